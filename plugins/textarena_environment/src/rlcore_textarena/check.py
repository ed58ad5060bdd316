"""Checks of the recipe's section, beyond types."""

from collections.abc import Iterator

from rlcore.schema.suggestions import did_you_mean
from rlcore.spi import CheckContext, Problem
from rlcore_textarena.config import POLICY, TextArenaConfig
from rlcore_textarena.game import Game, known_games
from rlcore_textarena.opponents import load_opponent, moves_in

SECTION = "environment.textarena"
OPPONENTS = '"policy", "random" or a function of (messages, random) as "package.module:name"'


def check(_context: CheckContext | None, config: TextArenaConfig) -> list[Problem]:
    """Problems of `[environment.textarena]`."""
    return [*_players(config), *_games(config), *_opponents(config)]


def _players(config: TextArenaConfig) -> Iterator[Problem]:
    if not config.players or set(config.players) - {0, 1} or len(set(config.players)) < len(config.players):
        found = str(list(config.players))
        yield Problem(path=f"{SECTION}.players", found=found, expected="0 or 1 or both, each once: [0, 1], [0] or [1]")


def _games(config: TextArenaConfig) -> Iterator[Problem]:
    path, known = f"{SECTION}.games", known_games()
    if not config.games:
        yield Problem(path=path, found="[]", expected="the name of a game at least, such as TicTacToe-v0")
    for name in config.games:
        if name not in known:
            expected = f"one of TextArena's {len(known)} games{did_you_mean(name, known)}"
            yield Problem(path=path, found=f"{name!r}, which is none", expected=expected)
            continue
        try:
            _, text = Game(name, 0).observe()
        except Exception as error:  # a game may lack a package, or data that TextArena downloads
            found = f"{name!r}, which does not begin with two players: {type(error).__name__}: {error}"
            yield Problem(path=path, found=found, expected="games for two players that can be played here")
            continue
        for key, opponent in (("opponent", config.opponent), ("evaluation_opponent", config.evaluation_opponent)):
            if opponent == "random" and not moves_in([{"role": "user", "content": text}]):
                found = f"'random', to whom {name} lists no moves"
                yield Problem(path=f"{SECTION}.{key}", found=found, expected='"policy", or a function that knows the game')


def _opponents(config: TextArenaConfig) -> Iterator[Problem]:
    for key, name in (("opponent", config.opponent), ("evaluation_opponent", config.evaluation_opponent)):
        if name != POLICY:
            try:
                load_opponent(name)
            except ValueError as error:
                yield Problem(path=f"{SECTION}.{key}", found=str(error), expected=OPPONENTS)
