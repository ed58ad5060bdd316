"""What is wrong with a section, all at once and with suggestions."""

import pytest

from rlcore_textarena.check import check
from rlcore_textarena.config import TextArenaConfig


def problems(**options):
    return {problem.path: f"{problem.found} / {problem.expected}" for problem in check(None, TextArenaConfig(**options))}


def test_the_defaults_fit():
    assert problems() == {}


def test_all_problems_come_at_once():
    found = problems(games=("KuhnPoke-v0",), players=(0, 2), opponent="nobody", evaluation_opponent="no_module:move")
    assert "did you mean 'KuhnPoker-v0'" in found["environment.textarena.games"]
    assert "[0, 2]" in found["environment.textarena.players"]
    assert "'nobody'" in found["environment.textarena.opponent"]
    assert "No module named 'no_module'" in found["environment.textarena.evaluation_opponent"]


@pytest.mark.parametrize("players", [(), (0, 0)])
def test_players_are_each_named_once(players):
    assert "environment.textarena.players" in problems(players=players)


def test_a_game_for_one_is_refused_with_the_games_own_words():
    assert "number of players has to be 1" in problems(games=("2048-v0",))["environment.textarena.games"]
    assert problems(games=())["environment.textarena.games"].startswith("[]")


def test_a_random_opponent_needs_a_list_of_moves():
    assert "Nim-v0 lists no moves" in problems(games=("Nim-v0",))["environment.textarena.evaluation_opponent"]
    assert problems(games=("Nim-v0",), evaluation_opponent="policy") == {}


def test_an_opponent_is_a_function():
    assert "which is no function" in problems(opponent="math:pi")["environment.textarena.opponent"]
