"""Whole runs against an independent GRPO in float64: recipe, loop, generator, environment, trainer, exported weights.

A run is started as a user starts it. `reference_run` computes it once more from the samples that it recorded, and `judging`
holds against that what the samples are, what the trainer was asked to do, every update's figures and the last weights. One rank
and two go through all combinations of the options (`make oracle`); `make test` goes through each pair of options on one rank.

A few seconds by itself: `pytest "tests/oracle/test_grpo_oracle.py::test_one_rank[fsdp2-4-updates-trainer-kl-whole]"`.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from attrs import evolve

from .cases import NUM_STEPS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, Case, named
from .conftest import Run
from .judging import judge
from .recorded import RecordedRun
from .reference_run import ReferenceRun

ONE_RANK = [
    Case(trainer=trainer, updates=updates, previous=previous, kl=kl, cut=cut)
    for trainer, updates, previous, kl, cut in product(
        ("fsdp2", "megatron"), (1, 4), ("generation", "trainer"), (False, True), (False, True)
    )
]
SELECTED = [
    Case(trainer="fsdp2", updates=1, previous="trainer", kl=False, cut=False, ranks=2, by_sequence=True),
    Case(trainer="megatron", updates=1, previous="generation", kl=True, cut=False, ranks=2, by_sequence=True),
]
"""Cases in which, with MASKED_TWO_RANKS, each trainer meets every option."""
TWO_RANKS = [*SELECTED, *(evolve(case, ranks=2) for case in ONE_RANK)]
MASKED = [
    Case(trainer="fsdp2", updates=4, previous="trainer", kl=True, cut=True, masked=True),
    Case(trainer="fsdp2", updates=1, previous="generation", kl=True, cut=True, masked=True),
    Case(trainer="megatron", updates=4, previous="generation", kl=True, cut=True, masked=True),
]
MASKED_TWO_RANKS = [
    Case(trainer="fsdp2", updates=4, previous="generation", kl=True, cut=True, masked=True, ranks=2),
    Case(trainer="megatron", updates=4, previous="trainer", kl=False, cut=True, masked=True, ranks=2),
]
NARROW = [
    Case(trainer="fsdp2", updates=4, previous="trainer", kl=True, cut=False, dtype="bfloat16"),
    Case(trainer="megatron", updates=4, previous="trainer", kl=True, cut=False, dtype="bfloat16"),
]
EPOCHS = [
    Case(trainer="fsdp2", updates=1, epochs=2, previous="trainer", kl=True, cut=False),
    Case(trainer="fsdp2", updates=2, epochs=2, previous="generation", kl=False, cut=False),
    Case(trainer="megatron", updates=2, epochs=2, previous="trainer", kl=False, cut=False),
]


@pytest.mark.wide(pairwise=True)
@named(ONE_RANK)
def test_one_rank(case: Case, run: Run, model: Path) -> None:
    assert_right(case, run(case, model), model)


@named(EPOCHS)
def test_two_epochs_of_a_step(case: Case, run: Run, model: Path) -> None:
    recorded = run(case, model)
    steps = judge(case, recorded, model)
    # An update of groups without a signal is left out, in each epoch.
    assert NUM_STEPS * case.updates < len(recorded.updates) <= NUM_STEPS * case.updates * case.epochs
    second = steps[0].updates[case.updates].figures
    assert second["ratio_max"] > 1.01


@named([Case(trainer="fsdp2", updates=2, previous="trainer", kl=False, cut=False, grows=True)])
def test_groups_of_different_sizes(case: Case, run: Run, model: Path) -> None:
    """Each sample is compared with those of its own group, however many there are."""
    recorded = run(case, model)
    judge(case, recorded, model)
    groups = [Counter(own.group for own in samples) for samples in recorded.samples]
    assert {SAMPLES_PER_PROMPT, 2 * SAMPLES_PER_PROMPT} == {size for group in groups for size in group.values()}


def test_two_ranks_of_each_trainer_meet_every_option() -> None:
    def met(cases: Sequence[Case]) -> set[tuple[object, ...]]:
        options = ("updates", "previous", "kl", "cut")
        return {(case.trainer, option, getattr(case, option)) for case in cases for option in options}

    assert met([*SELECTED, *MASKED_TWO_RANKS]) == met(ONE_RANK)


@pytest.mark.wide(keep=[SELECTED[1].name])
@pytest.mark.usefixtures("local_ray")
@named(TWO_RANKS)
def test_two_ranks(case: Case, run: Run, model: Path) -> None:
    assert_right(case, run(case, model), model)


@named(MASKED)
def test_truncated_sampling(case: Case, run: Run, model: Path) -> None:
    """The trainer normalises over what top-p had kept: before an update its ratios are 1."""
    recorded = run(case, model)
    assert_right(case, recorded, model)
    first = [parts[0].figures for parts in recorded.updates if "importance_ratio" in parts[0].figures]
    assert len(first) == NUM_STEPS
    assert [figures["importance_ratio"] for figures in first] == [pytest.approx(1.0, abs=1e-5)] * NUM_STEPS


@pytest.mark.wide(keep=[MASKED_TWO_RANKS[0].name])
@pytest.mark.usefixtures("local_ray")
@named(MASKED_TWO_RANKS)
def test_truncated_sampling_on_two_ranks(case: Case, run: Run, model: Path) -> None:
    assert_right(case, run(case, model), model)


@named(NARROW)
def test_bfloat16_moves_the_policy_as_far(case: Case, run: Run, model: Path) -> None:
    """Ratios and clipped shares, update by update; the weights themselves are rounded too coarsely to be compared."""
    recorded = run(case, model)
    updates = [update for step in ReferenceRun(model, case.options).steps(recorded.samples) for update in step.updates]
    assert len(recorded.updates) == len(updates)
    assert max(update.figures["clip_fraction"] for update in updates) > 0.1, "a policy that stays where it is would pass"
    for (part,), update in zip(recorded.updates, updates, strict=True):
        names = ("ratio_mean", "clip_fraction", "clip_fraction_low", "clip_fraction_high")
        assert [part.figures[name] for name in names] == [pytest.approx(update.figures[name], abs=0.05) for name in names]


def assert_right(case: Case, recorded: RecordedRun, model: Path) -> None:
    """And that the run, if it is right, exercises what it is to prove."""
    steps = judge(case, recorded, model)
    updates = [update for step in steps for update in step.updates]
    assert len({len(own.tokens) for own in recorded.samples[0]}) > 1
    assert max(len(part.microbatches) for parts in recorded.updates for part in parts) > 1
    pulled = [len({own.sample.group for own in step.samples if own.advantage}) for step in steps]
    assert any(0 < number < PROMPTS_PER_STEP for number in pulled), "groups that pull, and one of equal rewards"
    if case.updates > 1:
        norms = [update.figures["grad_norm"] for update in updates]
        assert min(norms) < case.options.max_grad_norm < max(norms)
        later = [update.figures for update in updates if not update.is_first]
        assert max(figures["ratio_max"] for figures in later) > 1.3
        assert max(figures["clip_fraction"] for figures in later) > 0
        assert case.kl or len(updates) < NUM_STEPS * case.updates, "an update that has nothing to learn from"
    if case.cut and not case.masked and case.previous == "trainer":
        assert any(0 < update.figures["importance_truncated"] < 1 for update in updates)
