"""Opponents that are no model."""

import re
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from random import Random
from typing import TypeAlias

from rlcore.spi import Message, RewardError

Opponent: TypeAlias = Callable[[Sequence[Message], Random], str]
"""(messages, random) -> the answer. `messages` are that player's: what it read as "user", what it said as "assistant"."""
_LIST = re.compile(r"available (?:moves|actions)(.*)", re.IGNORECASE)
"""A line from the name of a list on. The list begins behind a colon, which is searched once a line."""
_MOVE = re.compile(r"\[[^\[\]]+\]")


def moves_in(messages: Sequence[Message]) -> list[str]:
    """The moves that the game listed last, as '[0]', '[1]' in "Available Moves: …"; empty where it lists none."""
    for message in reversed(messages):
        if message["role"] == "user":
            lists = [rest.partition(":")[2] for rest in _LIST.findall(message["content"]) if ":" in rest]
            if lists:
                return _MOVE.findall(lists[-1])
    return []


def random_move(messages: Sequence[Message], random: Random) -> str:
    """One of the moves that the game listed last. RewardError where it lists none."""
    moves = moves_in(messages)
    if not moves:
        raise RewardError(
            f"the opponent 'random' found no list of moves in {messages[-1]['content']!r:.200}; expected \"Available moves:\" "
            'with moves in brackets. Name an opponent that knows the game: opponent = "package.module:name"'
        )
    return random.choice(moves)


def load_opponent(name: str) -> Opponent:
    """The function that "random" or "package.module:name" stands for. ValueError, with what was found, where there is none."""
    if name == "random":
        return random_move
    if ":" not in name:
        raise ValueError(f"{name!r}")
    try:
        function: Opponent = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r}, which cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"{name!r}, which is no function")
    return function
