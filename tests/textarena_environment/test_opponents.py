"""Opponents that are no model."""

from random import Random

import pytest

from rlcore.spi import RewardError
from rlcore_textarena.opponents import load_opponent, moves_in, random_move


def read(text):
    return {"role": "user", "content": text}


def test_the_moves_listed_last_count():
    messages = [read("Available Moves: '[0]', '[1]'"), {"role": "assistant", "content": "available moves: [9]"}]
    assert moves_in(messages) == ["[0]", "[1]"]
    messages.append(read("Your available actions are: '[check]', '[bet]'"))
    assert moves_in(messages) == ["[check]", "[bet]"]
    assert {random_move(messages, Random(seed)) for seed in range(20)} == {"[check]", "[bet]"}
    messages.append(read("available moves " * 40_000))
    assert moves_in(messages) == ["[check]", "[bet]"]


def test_a_game_without_a_list_is_named():
    with pytest.raises(RewardError, match="in 'take some'"):
        random_move([read("take some")], Random(0))


def test_an_opponent_is_found_by_its_name():
    assert load_opponent("random") is random_move
    assert load_opponent("rlcore_textarena.opponents:random_move") is random_move
    for name in ("nobody", "no_module:move", "random:nothing", "math:pi"):
        with pytest.raises(ValueError, match=name):
            load_opponent(name)
