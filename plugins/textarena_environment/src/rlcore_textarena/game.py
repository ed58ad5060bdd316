"""One game of TextArena: who is to move, what that player reads, and what comes of an answer."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import textarena
from textarena.envs.registration import ENV_REGISTRY

NOTHING_NEW = "It is your turn."
"""The text for a player to whom the game says nothing new."""


class Game:
    """A game for two. Its random numbers are its own, though TextArena draws from the one generator of module `random`: games
    may take turns in one thread."""

    def __init__(self, name: str, seed: int) -> None:
        """ValueError where it is no game for two players."""
        self._random = random.Random(seed).getstate()
        self._actions: list[Callable[[str], str]] = []
        with self._own_random():
            env = textarena.make(name)
            while isinstance(env, textarena.Wrapper):  # those that write all of the past into each observation are left out
                if isinstance(env, textarena.ActionWrapper):
                    self._actions.append(env.action)
                env = env.env
            self._env = env
            try:
                env.reset(num_players=2, seed=seed)
            except AssertionError as error:
                raise ValueError(str(error)) from error
        if set(env.state.role_mapping) - {textarena.GAME_ID} != {0, 1}:
            raise ValueError("its players are others than 0 and 1")

    def observe(self) -> tuple[int, str]:
        """The player to move, and what is new to it; what it said itself is left out."""
        with self._own_random():
            player, messages = self._env.get_observation()
        names = self._env.state.role_mapping
        told = [
            text.strip() if sender == textarena.GAME_ID else f"[{names.get(sender, f'Player {sender}')}] {text.strip()}"
            for sender, text, _ in messages
            if sender != player
        ]
        return player, "\n".join(filter(None, told)) or NOTHING_NEW

    def act(self, answer: str) -> bool:
        """Make the move of the player whose turn it is; whether the game has ended."""
        for action in self._actions:
            answer = action(answer)
        with self._own_random():
            done, _ = self._env.step(answer)
        return bool(done)

    def rewards(self) -> tuple[float, float]:
        """The rewards of players 0 and 1; zeros where the game has not ended."""
        rewards = self._env.close()[0] or {0: 0.0, 1: 0.0}
        return float(rewards[0]), float(rewards[1])

    def made_invalid_move(self, player: int) -> bool:
        """Whether the player lost by a move that the game does not allow."""
        return bool(self._env.state.game_info[player]["invalid_move"])

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        outer = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outer)


def known_games() -> list[str]:
    """The names of all games, of any number of players."""
    return sorted(ENV_REGISTRY)
