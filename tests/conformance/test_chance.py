"""The sequential test of the kit has the power that it states, and leaves a right sampler alone."""

from math import sqrt

import numpy as np
import pytest

from rlcore_conformance.generators.chance import Score

NUM_RUNS = 2000
EFFECT = 0.03


def runs(true_effect: float, information: float, most_blocks: int = 64) -> list[str]:
    """The last verdict of each run, of scores that are normal numbers of that mean, a block at a time."""
    random, verdicts = np.random.default_rng(7), []
    for _ in range(NUM_RUNS):
        score, verdict = Score(), "open"
        for _ in range(most_blocks):
            score.join(Score(true_effect * information + sqrt(information) * random.standard_normal(), information))
            verdict = score.verdict(EFFECT)
            if verdict != "open":
                break
        verdicts.append(verdict)
    return verdicts


@pytest.mark.parametrize("information", [2_000.0, 8_000.0, 36_000.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_an_effect_is_found_in_more_than_99_of_100_samplers(sign: float, information: float) -> None:
    verdicts = runs(sign * EFFECT, information)
    assert verdicts.count("excluded") < NUM_RUNS / 100
    assert verdicts.count("open") == 0


@pytest.mark.parametrize("information", [2_000.0, 8_000.0, 36_000.0])
def test_a_right_sampler_is_left_alone(information: float) -> None:
    assert runs(0.0, information) == ["excluded"] * NUM_RUNS


def test_too_little_information_tells_nothing() -> None:
    assert Score(difference=20.0, variance=20.0).verdict(1.0) == "open"
