"""Answers are scored by the family's rule; those that end the process of the rule are in test_environment.py."""

import pytest

from rlcore_reasoning_gym.config import FamilyConfig, ReasoningGymConfig
from rlcore_reasoning_gym.problems import Problems
from rlcore_reasoning_gym.scoring import answer_request

FAMILIES = ("caesar_cipher", "game_of_life_halting", "palindrome_generation", "prime_factorization")


@pytest.fixture(scope="module")
def rows():
    """A row of each family."""
    config = ReasoningGymConfig(families={name: FamilyConfig() for name in FAMILIES}, num_evaluation=40)
    return {row["family"]: row for row in Problems(config).rows("evaluation")}


def score_of(row, answer, **options):
    given = {"family": row["family"], "level": None, "options": "{}", "answer": answer, "entry": row["entry"], **options}
    return answer_request(None, given)


def test_partial_scores_stay_what_the_family_gives(rows):
    assert 0.0 < score_of(rows["palindrome_generation"], "no palindrome") < 1.0
    assert score_of(rows["caesar_cipher"], rows["caesar_cipher"]["answer"], level=1, options='{"max_words": 20}') == 1.0


def test_a_rule_that_fails_over_an_answer_gives_no_score(rows):
    assert score_of(rows["prime_factorization"], "many") is None


def test_a_family_whose_rule_takes_every_answer_is_compared(rows):
    row = rows["game_of_life_halting"]
    other = {"True": "False", "False": "True"}[row["answer"]]
    assert (score_of(row, row["answer"]), score_of(row, other)) == (1.0, 0.0)
