"""Options that contradict each other."""

import pytest

from rlcore.spi import CheckContext, ModelSpec
from rlcore_dpo.check import check
from rlcore_dpo.config import DpoConfig, OrpoConfig

CONTEXT = CheckContext(
    model=ModelSpec(path="none", revision=None, dtype="float32", trust_remote_code=False),
    device="cpu",
    world_size=1,
    max_sequence_length=8,
)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, []),
        ({"label_smoothing": 0.1}, []),
        ({"loss": "robust", "label_smoothing": 0.1}, []),
        ({"margin": 1.0, "reference": "none"}, []),
        ({"loss": "robust"}, ["label_smoothing"]),
        ({"loss": "ipo", "label_smoothing": 0.1}, ["label_smoothing"]),
        ({"loss": "hinge", "margin": 1.0}, ["margin"]),
        ({"loss": "apo_zero", "margin": 1.0, "label_smoothing": 0.1}, ["label_smoothing", "margin"]),
        ({"margin": 1.0, "label_smoothing": 0.1}, ["margin"]),
        ({"loss": "odds_ratio", "reference": "none", "length_normalised": True}, []),
        ({"loss": "odds_ratio", "reference": "none"}, ["loss"]),
        ({"loss": "odds_ratio", "length_normalised": True}, ["loss"]),
    ],
)
def test_combinations_without_a_meaning_are_named(options, keys):
    found = check(CONTEXT, DpoConfig(**options))
    assert [problem.path for problem in found] == [f"algorithm.dpo.{key}" for key in keys]


def test_options_of_orpo_have_a_section_of_their_own():
    assert check(CONTEXT, OrpoConfig()) == []
    assert [problem.path for problem in check(CONTEXT, OrpoConfig(margin=1.0))] == ["algorithm.orpo.margin"]
