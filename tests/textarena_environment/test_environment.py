"""Whole games over a server of sessions: who says what, what is recorded of it, and whose the reward is."""

import asyncio
import re

import pytest

from rlcore.spi import ConfigError, DataError, EnvironmentContext, RewardError
from rlcore_textarena.config import TextArenaConfig
from rlcore_textarena.environment import TextArenaEnvironment

from ..serving.sessions.chat_model import END, START, ChatMl
from .game_server import arena

FIRST_TO_WIN = {"Player 0": ["[0]", "[1]", "[2]"], "Player 1": ["[3]", "[4]"]}
"""Player 0 has a row with its third move."""


def environment(**options):
    return TextArenaEnvironment(EnvironmentContext(seed=0), TextArenaConfig(**options))


def row(**fields):
    return {"game": "TicTacToe-v0", "seed": 0, "player": 0, "opponent": "policy", **fields}


def scripted(read):
    """The move of the player who reads this: who it is, the game says first."""
    name = re.search(r"You are (Player \d)", read).group(1)
    return FIRST_TO_WIN[name][read.count(f"{START}assistant") - 1]


def first_listed(messages, random):
    return re.findall(r"'(\[\d\])'", messages[-1]["content"])[0]


def wrong(messages, random):
    raise KeyError("no move")


def play(place, task, seed=0, **options):
    return asyncio.run(environment(**options).run(task, seed, place.endpoint()))


def said(segment):
    """The answers in the loss."""
    return ChatMl().show(segment.tokens[segment.loss_mask].tolist()).split(END)[:-1]


@pytest.mark.parametrize(("player", "reward"), [(0, 1.0), (1, -1.0)])
def test_the_policy_plays_both_and_learns_from_the_rows_player_alone(player, reward):
    with arena(scripted) as place:
        result = play(place, row(player=player))
        (segment,) = place.recorded()
    assert said(segment) == FIRST_TO_WIN[f"Player {player}"]
    assert (result.reward, result.success) == (reward, reward > 0)
    expected = {"turns": 5.0, "unfinished": 0.0, "invalid_move": 0.0}
    assert result.metrics == expected | {f"reward_player_{player}": reward, f"win_player_{player}": float(reward > 0)}


def test_a_player_reads_what_is_new_once_and_not_what_it_said():
    with arena(scripted) as place:
        play(place, row(player=1))
        (segment,) = place.recorded()
    text = ChatMl().show(segment.tokens.tolist())
    assert text.count("You are Player 1") == 1
    assert "You are Player 0" not in text
    assert text.count("[Player 0] [1]") == 1
    assert "[Player 1]" not in text


def test_a_fixed_opponent_never_asks_the_policy():
    asked = []

    def move(read):
        asked.append(read)
        return ["[8]", "[7]", "[6]"][read.count(f"{START}assistant") - 1]

    with arena(move) as place:
        result = play(place, row(opponent=f"{__name__}:first_listed"))
        place.recorded()
    assert len(asked) == 3
    assert all("You are Player 0" in read for read in asked)
    assert result.success


def test_a_game_depends_on_its_row_and_seed():
    """Cards follow from the row, a random opponent from the seed too; and the module random is left as it was."""

    def move(read):
        return "[check]" if "'[check]'" in read.split("available actions")[-1] else "[fold]"

    poker = row(game="KuhnPoker-v0", opponent="random")
    with arena(move) as place:

        def recorded(task, seed):
            play(place, task, seed)
            return [segment.tokens.tolist() for segment in place.recorded()]

        first = recorded(poker, 1)
        assert recorded(poker, 1) == first
        assert any(recorded(poker, seed) != first for seed in range(2, 8))
        assert any(recorded({**poker, "seed": seed}, 1) != first for seed in range(1, 6))


def test_games_at_once_do_not_disturb_each_other():
    def move(read):
        return "[check]" if "'[check]'" in read.split("available actions")[-1] else "[fold]"

    tasks = [row(game="KuhnPoker-v0", opponent="random", seed=seed) for seed in range(6)]
    with arena(move) as place:
        source = environment()
        alone = [asyncio.run(source.run(task, 5, place.endpoint())).metrics for task in tasks]

        async def together():
            return await asyncio.gather(*(source.run(task, 5, place.endpoint()) for task in tasks))

        assert [result.metrics for result in asyncio.run(together())] == alone


def test_a_game_is_lost_by_what_is_no_move_and_drawn_without_an_end():
    with arena(lambda read: "I would rather not") as place:
        lost = play(place, row())
        drawn = play(place, row(), max_turns=1)
    assert (lost.reward, lost.success, lost.metrics["invalid_move"]) == (-1.0, False, 1.0)
    assert (drawn.reward, drawn.metrics["unfinished"]) == (0.0, 1.0)


def test_each_game_comes_once_for_each_player():
    source = environment(games=("TicTacToe-v0", "KuhnPoker-v0"), num_train=6)
    rows = source.rows("train")
    assert [(one["game"], one["player"]) for one in rows] == [
        ("TicTacToe-v0", 0),
        ("TicTacToe-v0", 1),
        ("KuhnPoker-v0", 0),
        ("KuhnPoker-v0", 1),
        ("TicTacToe-v0", 0),
        ("TicTacToe-v0", 1),
    ]
    assert [one["seed"] for one in rows] == [0, 0, 1, 1, 2, 2]
    assert {one["opponent"] for one in rows} == {"policy"}
    held_out = source.rows("evaluation")
    assert {one["opponent"] for one in held_out} == {"random"}
    assert not {one["seed"] for one in held_out} & {one["seed"] for one in rows}
    assert {one["player"] for one in environment(players=(1,)).rows("train")} == {1}


def test_other_rows_are_refused_with_all_that_is_wrong():
    task = {"game": "TicTacTo-v0", "seed": -1, "player": 2, "opponent": "nobody"}
    with arena(scripted) as place, pytest.raises(DataError) as caught:
        play(place, task)
    for found in ("'TicTacTo-v0'", "the seed -1", "the player 2", "the opponent 'nobody'"):
        assert found in str(caught.value)


def test_a_conversation_that_outgrows_its_room_says_what_to_raise():
    with (
        arena(scripted, max_sequence_length=100) as place,
        pytest.raises(RewardError, match=r"raise rollout\.max_prompt_tokens"),
    ):
        play(place, row())


def test_an_opponent_that_fails_is_named():
    with arena(scripted) as place, pytest.raises(RewardError, match="the opponent raised KeyError: 'no move'"):
        play(place, row(opponent=f"{__name__}:wrong"))


def test_a_section_that_does_not_fit_builds_nothing():
    with pytest.raises(ConfigError, match="did you mean 'TicTacToe-v0'"):
        environment(games=("TicTacTo-v0",))
