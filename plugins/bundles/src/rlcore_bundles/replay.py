"""Replays a bundle: the step once as it is, and again with weights changed by one rounding, which say what rounding does."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import evolve, frozen

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, Problem
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.components import trainer_name
from rlcore_bundles.difference import compare
from rlcore_bundles.older_weights import older_starts, with_older_weights
from rlcore_bundles.perturbed import coarser, measurable, perturbed_start
from rlcore_bundles.recomputed_rewards import Rewards, reason_to_skip, recomputed_rewards
from rlcore_bundles.replaying import Replayed, Start, plan_of, replayed
from rlcore_bundles.rows import Row

NUM_PERTURBED = 2
"""Replays that measure rounding."""


@frozen(kw_only=True)
class Replay:
    """A bundle's step beside the same step computed again."""

    rows: Sequence[Row]
    trainer: str
    """The trainer of the replay, with its version."""
    dtype: str
    device: str
    notes: Sequence[str]


@frozen(kw_only=True, eq=False)
class Computed:
    """A bundle's step computed again in this process or another one."""

    replayed: Replayed
    rewards: Rewards | str
    """The episodes, or why they were not repeated."""
    start: Start
    """The weights that it began with: without the trainer's state, where that is another trainer's."""

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of packages there."""
        found: Mapping[str, str] = self.replayed.bundle.environment["distributions"]
        return found


def computed(bundle: Bundle, plan: RunPlan, start: Start, *, skips_rewards: str = "") -> Computed:
    """Compute a step by a plan. `skips_rewards`: why the environment does not judge the samples; "" where it does."""
    if start.state is not None and plan.chosen["trainer"].name != trainer_name(bundle):
        start = evolve(start, state=None)  # a trainer reads the state of no other
    rewards = skips_rewards or reason_to_skip(bundle, plan) or recomputed_rewards(bundle, plan)
    is_own = bundle.own_step is not None
    wants = (
        (is_own or start.is_whole(bundle)) and plan.model.dtype == bundle.environment["dtype"] and bool(bundle.digests_after)
    )
    return Computed(replayed=replayed(bundle, plan, start, digests=wants), rewards=rewards, start=start)


def unrounded(bundle: Bundle, start: Start, planned: Callable[[Start], RunPlan]) -> Replayed | None:
    """The step from a measurable start; None where `start` is one."""
    steady = measurable(start)
    return None if steady == start else replayed(bundle, planned(steady), steady, digests=False)


def rounded(bundle: Bundle, start: Start, dtype: str, number: int, planned: Callable[[Start], RunPlan]) -> Replayed:
    """The step from a measurable start with each weight changed by one unit of a dtype, up or down as the number says."""
    with tempfile.TemporaryDirectory() as folder:
        moved = perturbed_start(measurable(start), Path(folder), dtype, number)
        return replayed(bundle, planned(moved), moved, digests=False)


def require_prompts(bundles: Mapping[str, Bundle]) -> None:
    """Raise ConfigError, with each bundle's name, where one is without its prompts."""
    problems = [
        Problem(path=name, found=f"a bundle whose prompts are {one.prompts}", expected="one with its prompts")
        for name, one in bundles.items()
        if one.prompts != "kept"
    ]
    if problems:
        raise ConfigError(problems)


def replay(
    bundle: Bundle,
    overrides: Sequence[str] = (),
    *,
    weights: Path | None = None,
    rewards: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> Replay:
    """Compute a bundle's step again and compare. `overrides` are those of a recipe, such as "trainer.name=fsdp2"; `weights` is
    the Hugging Face directory, or of adapters the PEFT one, of the weights at the beginning of the step. `rewards`: the
    environment judges the samples again. `tell` is called with what happens. Raises RlcoreError before anything is allocated
    where the step cannot be computed."""
    require_prompts({"BUNDLE": bundle})
    start = Start.of(bundle, weights)
    plan = plan_of(bundle, start, overrides)
    tell(f"replay of step {bundle.step} by {plan.chosen['trainer'].label} in {plan.model.dtype} on {plan.device}")
    made = computed(bundle, plan, start, skips_rewards="" if rewards else "the command leaves rewards out")
    again = made.replayed
    if bundle.own_step is None:
        again = with_older_weights(bundle, again, older_starts(bundle), overrides, tell)

    def planned(moved: Start) -> RunPlan:
        return plan_of(bundle, moved, overrides)

    base, others = unrounded(bundle, made.start, planned), list[Replayed]()
    for number in range(1, NUM_PERTURBED + 1):
        tell(f"rounding {number} of {NUM_PERTURBED}: all weights changed by one unit")
        dtype = coarser(plan.model.dtype, bundle.environment["dtype"])
        others.append(rounded(bundle, made.start, dtype, number, planned))
    rows = compare(bundle, again, others, made.rewards, whole=made.start.is_whole(bundle), unperturbed=base)
    return Replay(rows=rows, trainer=plan.chosen["trainer"].label, dtype=plan.model.dtype, device=plan.device, notes=plan.notes)
