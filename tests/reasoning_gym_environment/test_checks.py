"""What is refused before a run, all at once and in the family's own words."""

import pytest

from rlcore.schema.structure import structure
from rlcore.spi import CheckContext, ModelSpec
from rlcore_reasoning_gym.checks import check_reasoning_gym
from rlcore_reasoning_gym.config import FamilyConfig, ReasoningGymConfig

PATH = "environment.reasoning_gym"


def problems(families, context=None, **options):
    config = ReasoningGymConfig(families=families, num_train=100, **options)
    return check_reasoning_gym(context, config)


def test_a_recipe_with_families_passes():
    chosen = {"chain_sum": FamilyConfig(levels=(0, 1), options={"max_digits": 9}), "list_functions": FamilyConfig()}
    assert problems(chosen) == []


def test_no_family_is_told_which_there_are():
    (problem,) = problems({})
    assert problem.path == f"{PATH}.families"
    assert "word_ladder" in problem.remedy


def test_unknown_families_are_told_what_is_near():
    near, far, mixture = problems({name: FamilyConfig() for name in ("chian_sum", "zzzzzz", "composite")})
    assert near.path == f"{PATH}.families.chian_sum"
    assert "chain_sum" in near.remedy
    assert "word_ladder" in far.remedy
    assert "mixture" in mixture.remedy


def test_unknown_options_are_told_what_is_near_and_all_are_reported():
    found = problems({"chain_sum": FamilyConfig(levels=(99,), options={"max_term": 2, "seed": 1, "size": 2})})
    assert [problem.path.removeprefix(f"{PATH}.families.chain_sum.") for problem in found] == [
        "levels",
        "options.max_term",
        "options.seed",
        "options.size",
    ]
    assert "max_terms" in found[1].remedy
    assert "problem_seed" in found[2].remedy
    assert "num_train" in found[3].remedy


@pytest.mark.parametrize(
    ("family", "options", "word"),
    [
        ("chain_sum", {"min_terms": 0}, "min_terms"),
        ("chain_sum", {"min_terms": "two"}, "TypeError"),
        ("gcd", {"max_value": 0}, "max_value"),
    ],
)
def test_a_family_speaks_of_its_options_itself(family, options, word):
    (problem,) = problems({family: FamilyConfig(options=options)})
    assert problem.path == f"{PATH}.families.{family}.options"
    assert word in problem.expected


def test_a_family_without_a_curriculum_has_no_levels():
    (problem,) = problems({"list_functions": FamilyConfig(levels=(0,))})
    assert "curriculum" in problem.expected


def test_a_level_that_the_family_refuses():
    (problem,) = problems({"caesar_cipher": FamilyConfig(levels=(0, 3))})
    assert "level 3" in problem.found
    assert "rotation" in problem.expected


@pytest.mark.parametrize(("value", "count"), [(None, 1), ("random", 1), ("0", 0), ("7", 0)])
def test_families_that_follow_the_hash_seed_need_one(monkeypatch, value, count):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if value is not None:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    found = problems({"ransom_note": FamilyConfig()})
    assert len(found) == count
    assert all("PYTHONHASHSEED=0" in problem.remedy for problem in found)


def test_time_limits_and_system_prompts_have_to_fit():
    context = CheckContext(
        model=ModelSpec(path="m"), device="cpu", world_size=1, max_sequence_length=16, environment_timeout_s=10.0
    )
    found = problems({"gcd": FamilyConfig()}, context, prompt_format="text", system_prompt="Be brief.")
    assert [problem.path.rpartition(".")[2] for problem in found] == ["system_prompt", "scoring_timeout_s"]


@pytest.mark.parametrize(
    "value",
    [
        {"families": {"gcd": {"weight": 0.0}}},
        {"families": {"gcd": {"levels": [0, 0]}}},
        {"families": {"gcd": {"levels": [-1]}}},
        {"families": {"gcd": {"max_value": 3}}},
        {"answer_tag": "a b"},
    ],
)
def test_values_that_no_recipe_may_have(value):
    made, found = structure(value, ReasoningGymConfig, PATH)
    assert made is None
    assert len(found) == 1
