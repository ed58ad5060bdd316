"""Games of the real package: their random numbers, their turns, their ends."""

import random

import pytest

from rlcore_textarena.game import NOTHING_NEW, Game, known_games


def test_a_game_leaves_the_module_random_as_it_was():
    random.seed(7)
    expected = random.random()
    random.seed(7)
    game = Game("KuhnPoker-v0", 3)
    game.observe()
    game.act("[check]")
    assert random.random() == expected


def test_games_in_turn_are_dealt_as_alone():
    def played(game):
        """A bet and a fold; the next round's cards are drawn behind them."""
        read = []
        for move in ("[bet]", "[fold]"):
            read.append(game.observe())
            yield
            game.act(move)
        yield [*read, game.observe()]

    alone = [[*played(Game("KuhnPoker-v0", seed))][-1] for seed in range(3, 7)]
    in_turn = zip(*(played(Game("KuhnPoker-v0", seed)) for seed in range(3, 7)), strict=True)
    assert list([*in_turn][-1]) == alone
    assert len({str(read) for read in alone}) > 1


def test_an_answer_without_brackets_gets_them():
    game = Game("TicTacToe-v0", 0)
    game.observe()
    assert not game.act("4")
    player, text = game.observe()
    assert player == 1
    assert "placed their symbol (O) in cell 4" in text


def test_a_turn_with_nothing_new_is_said():
    game = Game("TicTacToe-v0", 0)
    game.observe()
    assert game.observe() == (0, NOTHING_NEW)


def test_a_game_without_an_end_has_no_rewards():
    assert Game("TicTacToe-v0", 0).rewards() == (0.0, 0.0)


def test_games_for_others_than_two_are_refused():
    with pytest.raises(ValueError, match="number of players"):
        Game("2048-v0", 0)
    assert "2048-v0" in known_games()
