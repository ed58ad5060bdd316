"""Rows are determined by their number, mixed by weights and levels, and none is both trained on and held out."""

from collections import Counter

import pytest

from rlcore.spi import DataError
from rlcore_reasoning_gym.config import FamilyConfig, ReasoningGymConfig
from rlcore_reasoning_gym.problems import Problems

SMALL = {"max_terms": 2, "min_digits": 1, "max_digits": 1}


def config(families=("chain_sum", "gcd"), **options):
    made = families if isinstance(families, dict) else {name: FamilyConfig() for name in families}
    return ReasoningGymConfig(families=made, **{"num_train": 200, "num_evaluation": 50, **options})


def questions(rows):
    return {row["entry"]["question"] for row in rows}


def test_rows_follow_from_their_number_and_the_seed():
    rows = Problems(config()).rows("train")
    assert len(rows) == 200
    assert rows[7] == rows[7] == Problems(config()).rows("train")[7]
    assert list(rows[5:8]) == [rows[5], rows[6], rows[7]]
    assert rows[7] != Problems(config(problem_seed=1)).rows("train")[7]
    assert len(Problems(config()).rows("evaluation")) == 50


def test_only_rows_that_are_taken_are_made():
    row = Problems(config(("knight_swap",), num_train=10_000, num_evaluation=1)).rows("train")[9_999]
    assert row["family"] == "knight_swap"


@pytest.mark.parametrize("options", [{}, SMALL])
def test_no_question_is_both_trained_on_and_held_out(options):
    problems = Problems(config({"chain_sum": FamilyConfig(options=options)}))
    train, held_out = (problems.rows(split) for split in ("train", "evaluation"))
    assert train
    assert held_out
    assert not questions(train) & questions(held_out)


def test_a_family_without_a_problem_left_to_train_on_is_named():
    problems = Problems(config({"gcd": FamilyConfig(options={"min_value": 1, "max_value": 2})}))
    with pytest.raises(DataError, match="'gcd'"):
        problems.rows("train")[0]


def test_a_family_that_makes_no_problem_is_named():
    family = FamilyConfig(options={"min_words": 10**7, "max_words": 10**7})
    with pytest.raises(DataError, match="families.word_sorting"):
        Problems(config({"word_sorting": family})).rows("evaluation")


def test_weights_and_levels_mix():
    families = {"chain_sum": FamilyConfig(weight=3.0, levels=(0, 2)), "gcd": FamilyConfig()}
    counts = Counter((row["family"], row["level"]) for row in Problems(config(families, num_train=400)).rows("train"))
    assert set(counts) == {("chain_sum", 0), ("chain_sum", 2), ("gcd", None)}
    assert 60 <= counts["gcd", None] <= 140
    assert 100 <= counts["chain_sum", 0] <= 200


def test_levels_are_told_without_making_rows():
    rows = Problems(config({"gcd": FamilyConfig(levels=(0, 2)), "chain_sum": FamilyConfig()}, num_train=40)).rows("train")
    assert [rows.level_of(number) for number in range(40)] == [row["level"] for row in rows]
    assert {0, 2, None} == {rows.level_of(number) for number in range(40)}


def test_prompts_are_messages_or_text():
    (first,) = Problems(config(num_evaluation=1, system_prompt="Be brief.", instruction="Now.")).rows("evaluation")
    system, user = first["prompt"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": f"{first['entry']['question'].strip()}\n\nNow."}
    (text,) = Problems(config(num_evaluation=1, prompt_format="text", instruction="")).rows("evaluation")
    assert text["prompt"] == first["entry"]["question"].strip()


def test_another_split_is_refused():
    with pytest.raises(ValueError, match="'test'"):
        Problems(config()).rows("test")
