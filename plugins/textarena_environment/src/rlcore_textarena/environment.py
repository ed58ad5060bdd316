"""The environment `textarena`: a game for each episode, in which the policy is asked through its session."""

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import openai
from attrs import frozen

from rlcore.spi import (
    ConfigError,
    DataError,
    EnvironmentContext,
    EpisodeFailure,
    EpisodeResult,
    LazyRows,
    Message,
    RewardError,
    Row,
    SessionEndpoint,
    fails_as,
)
from rlcore.thoughts import without_thoughts
from rlcore_textarena.check import OPPONENTS, check
from rlcore_textarena.config import POLICY, TextArenaConfig
from rlcore_textarena.game import Game, known_games
from rlcore_textarena.opponents import Opponent, load_opponent

HELD_OUT = 2**31
"""The seeds of held-out games begin here."""
UNFINISHED = EpisodeFailure(kind="limit", reason="the game had not ended (environment.textarena.max_turns)")


@frozen(kw_only=True)
class Task:
    """A row: a game, who is trained in it, and against whom."""

    game: str
    seed: int
    player: int
    opponent: Opponent | None
    """None for the policy."""


class TextArenaEnvironment:
    """One player of each game is trained; the row says which. So the samples of a group, which start from one row, are all one
    player's, and an advantage compares its rewards with its own alone."""

    def __init__(self, context: EnvironmentContext, config: TextArenaConfig) -> None:  # noqa: ARG002 - games have their own seed
        if problems := check(None, config):
            raise ConfigError(problems)
        self._config = config
        self._known = frozenset(known_games())

    def rows(self, split: str) -> Sequence[Row]:
        """Games of "train" or "evaluation", with the fields game, seed, player and opponent."""
        config = self._config
        if split == "train":
            return LazyRows(config.num_train, partial(self._row, 0, config.opponent))
        return LazyRows(config.num_evaluation, partial(self._row, HELD_OUT, config.evaluation_opponent))

    def _row(self, first_seed: int, opponent: str, number: int) -> Row:
        config = self._config
        dealt, turn = divmod(number, len(config.players))
        return {
            "game": config.games[dealt % len(config.games)],
            "seed": config.game_seed * 2 * HELD_OUT + first_seed + dealt,
            "player": config.players[turn],
            "opponent": opponent,
        }

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        """Play a row's game to its end. The reward is the trained player's, and success is more than the other's."""
        task = self._task(row)
        game, random = Game(task.game, task.seed), Random(seed)
        messages: dict[int, list[Message]] = {0: [], 1: []}
        done, num_turns = False, 0
        direct = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)  # the session is on this machine, by plain HTTP
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, http_client=direct, timeout=None
        ) as client:
            while not done and num_turns < self._config.max_turns:
                player, text = game.observe()
                said = messages[player]
                said.append({"role": "user", "content": text})
                if player != task.player and task.opponent is not None:
                    answer = move = _opponents_answer(task.opponent, said, random)
                else:
                    answer, move = await _ask(client, session.model, said, game=task.game, record=player == task.player)
                said.append({"role": "assistant", "content": answer})
                done = game.act(move)
                num_turns += 1
        return _result(game, task.player, num_turns, done=done)

    def _task(self, row: Row) -> Task:
        """DataError, with all that is wrong, where a row is no task."""
        game, seed, player, opponent = (row.get(name) for name in ("game", "seed", "player", "opponent"))
        problems = []
        if game not in self._known:
            problems.append(f"the game {game!r:.60}; expected one of TextArena's")
        if type(seed) is not int or seed < 0:
            problems.append(f"the seed {seed!r:.60}; expected an integer of at least 0")
        if type(player) is not int or player not in (0, 1):
            problems.append(f"the player {player!r:.60}; expected 0 or 1")
        play = None
        if opponent != POLICY:
            try:
                play = load_opponent(str(opponent))
            except ValueError as error:
                problems.append(f"the opponent {error}; expected {OPPONENTS}")
        if problems:
            raise DataError("found a row with " + "\nand ".join(problems))
        return Task(game=str(game), seed=seed, player=player, opponent=play)  # type: ignore[arg-type]


async def _ask(client: Any, model: str, messages: Sequence[Message], *, game: str, record: bool) -> tuple[str, str]:
    """The policy's answer, and its move, which is the answer without thoughts. An answer that is not recorded is not trained
    on."""
    try:
        reply = await client.chat.completions.create(model=model, messages=messages, extra_body={"record": record})
    except openai.APIError as error:
        is_long, remedy = getattr(error, "code", None) == "context_length_exceeded", ""
        if is_long:
            remedy = f". A game of {game} is longer: raise rollout.max_prompt_tokens, or lower rollout.max_response_tokens"
        with fails_as("limit" if is_long else "infrastructure"):
            raise RewardError(f"the policy's turn {len(messages) // 2 + 1} in {game} was refused: {error}{remedy}") from error
    choice = reply.choices[0]
    answer = choice.message.content or ""
    return answer, without_thoughts(answer)


def _opponents_answer(opponent: Opponent, messages: Sequence[Message], random: Random) -> str:
    try:
        answer = opponent(tuple(messages), random)
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(f"the opponent raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, str):
        raise RewardError(f"the opponent answered {answer!r:.60}; expected text")
    return answer


def _result(game: Game, player: int, num_turns: int, *, done: bool) -> EpisodeResult:
    rewards = game.rewards() if done else (0.0, 0.0)
    reward, other = rewards[player], rewards[1 - player]
    return EpisodeResult(
        reward=reward,
        success=reward > other,
        metrics={
            "turns": float(num_turns),
            "unfinished": float(not done),
            "invalid_move": float(game.made_invalid_move(player)),
            f"reward_player_{player}": reward,
            f"win_player_{player}": float(reward > other),
        },
        failure=None if done else UNFINISHED,
    )
