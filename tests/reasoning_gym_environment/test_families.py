"""Every family of the package makes a row, whose own answer earns all and another one less."""

import json

import pytest

from rlcore_reasoning_gym.answers import answer_of
from rlcore_reasoning_gym.config import FamilyConfig, ReasoningGymConfig
from rlcore_reasoning_gym.families import FAMILIES, Family, num_levels, option_names
from rlcore_reasoning_gym.problems import Problems
from rlcore_reasoning_gym.scoring import score

ELSEWHERE = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Where the metadata have one of several right answers."""
UNKNOWN = {"boxnet", "rush_hour"}
"""Families that make problems without solving them."""


def right_answer(row):
    if row["family"] in ELSEWHERE:
        known = row["entry"]["metadata"][ELSEWHERE[row["family"]]]
        return known if isinstance(known, str) else json.dumps(known)
    return row.get("answer")


def score_of(row, answer):
    """What the family's rule says; an error of it counts as nothing, as in the worker processes."""
    try:
        return score(family=row["family"], level=row["level"], options="{}", answer=answer, entry=row["entry"])
    except ValueError:
        return 0.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_of_a_family_earns_all_and_another_less(name):
    config = ReasoningGymConfig(families={name: FamilyConfig()}, num_train=20, num_evaluation=1)
    row = Problems(config).rows("evaluation")[0]
    assert row["entry"]["question"].strip() in row["prompt"][0]["content"]
    answer = right_answer(row)
    assert (answer is None) == (name in UNKNOWN)
    if answer is not None:
        assert score_of(row, answer) == 1.0
    if "completion" in row:
        assert answer_of(row["completion"], config) == row["answer"].strip()
    assert score_of(row, "True" if answer == "False" else "no such answer") < 1.0


def test_there_are_families_without_the_mixture():
    assert len(FAMILIES) > 100
    assert "composite" not in FAMILIES
    assert {"chain_sum", "gcd"} <= set(FAMILIES)


def test_options_are_those_of_the_family_without_what_the_environment_sets():
    assert "max_terms" in option_names("chain_sum")
    assert not {"seed", "size"} & set(option_names("chain_sum"))


def test_levels_follow_the_curriculum_of_the_family_and_options_overrule_them():
    assert num_levels("chain_sum") > 1
    assert num_levels("list_functions") == 0
    easy, hard = (Family(name="chain_sum", level=level, options={}).data_set(0, 1).config for level in (0, 2))
    assert easy.max_terms < hard.max_terms
    assert easy.max_digits < hard.max_digits
    mixed = Family(name="chain_sum", level=2, options={"max_digits": 9}).data_set(0, 1).config
    assert (mixed.max_terms, mixed.max_digits) == (hard.max_terms, 9)
