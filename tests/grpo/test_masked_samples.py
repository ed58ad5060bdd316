"""A masked sample is in no estimator: the advantages of the others are those of a step without it, by a float64 formula."""

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from rlcore.spi import ADVANTAGES, REFERENCE_LOGPROBS, RolloutBatch, TurnRewards
from rlcore.spi.arrays import offsets_of
from rlcore_grpo import presets
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.loss_config import AdvantageNormalisation, Baseline

from .grpo_rollouts import make_grpo, make_rollouts  # type: ignore[import-not-found]

Float64Array = NDArray[np.float64]
REWARDS = (1.0, 0.25, 0.0, 0.5, 1.0, 0.0, 0.5, 0.75, 0.0, 0.5)
GROUPS = (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)
MASKED = (1, 5)
"""Samples that are masked, whose rewards would have been something else than the 0.0 that a batch holds for them."""
KEPT = tuple(number for number in range(len(REWARDS)) if number not in MASKED)
PRESETS = [one for one in vars(presets).values() if isinstance(one, type) and issubclass(one, GrpoConfig)]


def rollouts(numbers: tuple[int, ...], masked: tuple[int, ...] = ()) -> RolloutBatch:
    """Samples of REWARDS, of which `masked` are; those have no reward, as collectors pack them."""
    valid = [number not in masked for number in numbers]
    rewards = [REWARDS[number] if is_valid else 0.0 for number, is_valid in zip(numbers, valid, strict=True)]
    made: RolloutBatch = make_rollouts(rewards, [GROUPS[number] for number in numbers], valid)
    reference = np.repeat([-1.0 - 0.1 * number for number in numbers], made.batch.lengths).astype(np.float32)
    batch = made.batch.with_token_column(REFERENCE_LOGPROBS, np.where(made.batch.loss_mask, reference, np.float32(0)))
    return evolve(
        made, batch=batch, reward_components={"part": made.rewards * np.float32(0.5), "rest": made.rewards * np.float32(0.25)}
    )


def of_samples(batch: RolloutBatch, config: GrpoConfig) -> Float64Array:
    """float64 [N]: the advantage of each sample's last token."""
    built = make_grpo(config).build_batch(batch).batch
    per_token: Float64Array = built.token_columns[ADVANTAGES].astype(np.float64)
    return per_token[built.offsets[1:] - 1]


@pytest.mark.parametrize("config", [GrpoConfig, *PRESETS], ids=lambda config: config.__name__)
def test_every_algorithm_trains_the_others_as_if_a_masked_sample_were_not_there(config: type[GrpoConfig]) -> None:
    options = {"constant_length": 4} if config().loss_normalisation == "constant" else {}
    if config().reward_aggregation == "normalise_then_sum":
        options |= {"reward_weights": {"part": 1.0, "rest": 2.0}}
    made = config(**options)  # type: ignore[arg-type]
    everyone = tuple(range(len(REWARDS)))
    with_masked, without = of_samples(rollouts(everyone, MASKED), made), of_samples(rollouts(KEPT), made)
    assert with_masked[list(KEPT)].tolist() == without.tolist()
    assert with_masked[list(MASKED)].tolist() == [0.0, 0.0]
    assert np.abs(without).max() > 0
    as_zero = of_samples(rollouts(everyone), evolve(made))
    assert not np.allclose(with_masked, as_zero)


def in_groups(compute: Callable[[Float64Array], Float64Array]) -> Float64Array:
    """float64 [N]: a formula of the rewards of each group's kept samples; 0.0 of those that are masked."""
    found = np.zeros(len(REWARDS))
    for group in set(GROUPS):
        members = [number for number in KEPT if GROUPS[number] == group]
        found[members] = compute(np.array([REWARDS[number] for number in members], np.float64))
    return found


def leave_one_out(rewards: Float64Array) -> Float64Array:
    return np.array([reward - np.delete(rewards, place).mean() for place, reward in enumerate(rewards)])


def over_all(compute: Callable[[Float64Array], Float64Array]) -> Float64Array:
    found = np.zeros(len(REWARDS))
    found[list(KEPT)] = compute(np.array([REWARDS[number] for number in KEPT], np.float64))
    return found


FORMULAS: list[tuple[Baseline, AdvantageNormalisation, Float64Array]] = [
    ("group_mean", "none", in_groups(lambda r: r - r.mean())),
    ("group_mean", "std", in_groups(lambda r: (r - r.mean()) / r.std(ddof=1))),
    ("group_mean", "mean", in_groups(lambda r: (r - r.mean()) / r.mean())),
    ("leave_one_out", "none", in_groups(leave_one_out)),
    ("leave_one_out", "std", in_groups(lambda r: leave_one_out(r) / r.std(ddof=1))),
    ("batch_mean", "none", over_all(lambda r: r - r.mean())),
    ("none", "none", over_all(lambda r: r)),
    ("none", "sample_whitening", over_all(lambda r: (r - r.mean()) / r.std(ddof=1))),
    (
        "group_mean",
        "batch_std",
        in_groups(lambda r: r - r.mean()) / np.array([REWARDS[number] for number in KEPT]).std(ddof=1),
    ),
    (
        "group_mean",
        "leave_one_out_std",
        in_groups(
            lambda r: (r - r.mean()) / [max(np.delete(r, place).std(ddof=1), r.std(ddof=1) / 2) for place in range(len(r))]
        ),
    ),
]


def test_the_formulas_have_every_baseline() -> None:
    assert {baseline for baseline, _, _ in FORMULAS} == set(get_args(Baseline))
    assert {name for _, name, _ in FORMULAS} | {"batch_whitening"} == set(get_args(AdvantageNormalisation))


@pytest.mark.parametrize(("baseline", "normalisation", "expected"), FORMULAS)
def test_each_estimator_is_the_formula_of_the_samples_that_count(
    baseline: Baseline, normalisation: AdvantageNormalisation, expected: Float64Array
) -> None:
    config = GrpoConfig(advantage_baseline=baseline, advantage_normalisation=normalisation, advantage_epsilon=1e-12)
    found = of_samples(rollouts(tuple(range(len(REWARDS))), MASKED), config)
    np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-7)


def test_a_masked_sample_is_in_no_divisor_of_a_loss() -> None:
    assert rollouts(tuple(range(len(REWARDS))), MASKED).batch.counts() == rollouts(KEPT).batch.counts()


def in_turns(numbers: tuple[int, ...], masked: tuple[int, ...] = ()) -> RolloutBatch:
    """Samples whose last two tokens are two turns, each with half of the reward."""
    made = rollouts(numbers, masked)
    turn_of = np.tile(np.array([-1, -1, -1, 0, 1], np.int32), len(numbers))
    mask = made.batch.loss_mask & (turn_of >= 0)
    turns = TurnRewards(rewards=np.repeat(made.rewards / 2, 2), offsets=offsets_of([2] * len(numbers)), turn_of=turn_of)
    return evolve(made, batch=evolve(made.batch, loss_mask=mask), turns=turns)


def test_advantages_of_turns_are_those_without_a_masked_sample() -> None:
    config = GrpoConfig(advantage_per="turn")
    found = of_samples(in_turns(tuple(range(len(REWARDS))), MASKED), config)
    without = of_samples(in_turns(KEPT), config)
    assert found[list(KEPT)].tolist() == without.tolist()
    assert found[list(MASKED)].tolist() == [0.0, 0.0]
    assert np.abs(without).max() > 0
