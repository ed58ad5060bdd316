"""Replays a bundle: the step once as it is, and again with weights changed by one rounding, which say what rounding does."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve, frozen

from rlcore.spi import ConfigError, Problem
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.components import trainer_name
from rlcore_bundles.difference import Row, compare
from rlcore_bundles.older_weights import older_starts, with_older_weights
from rlcore_bundles.perturbed import coarser, perturbed_start
from rlcore_bundles.recomputed_rewards import reason_to_skip, recomputed_rewards
from rlcore_bundles.replaying import Start, plan_of, replayed

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
    if bundle.prompts != "kept":
        found = f"a bundle whose prompts are {bundle.prompts}"
        problem = Problem(path="bundle", found=found, expected="one with its prompts, which the model reads")
        raise ConfigError([problem])
    start = Start.of(bundle, weights)
    plan = plan_of(bundle, start, overrides)
    if start.state is not None and plan.chosen["trainer"].name != trainer_name(bundle):
        start = evolve(start, state=None)  # a trainer reads the state of no other
    is_whole = start.is_whole(bundle)
    reason = reason_to_skip(bundle, plan) if rewards else "the command leaves rewards out"
    tell(f"replay of step {bundle.step} by {plan.chosen['trainer'].label} in {plan.model.dtype} on {plan.device}")
    judged = reason or recomputed_rewards(bundle, plan)
    same_dtype = plan.model.dtype == bundle.environment["dtype"]
    again = replayed(bundle, plan, start, digests=is_whole and same_dtype and bool(bundle.digests_after))
    again = with_older_weights(bundle, again, older_starts(bundle), overrides, tell)
    others = []
    for number in range(1, NUM_PERTURBED + 1):
        tell(f"rounding {number} of {NUM_PERTURBED}: all weights changed by one unit")
        with tempfile.TemporaryDirectory() as folder:
            dtype = coarser(plan.model.dtype, bundle.environment["dtype"])
            moved = perturbed_start(start, Path(folder), dtype, number)
            others.append(replayed(bundle, plan_of(bundle, moved, overrides), moved, digests=False))
    if not same_dtype:
        again = evolve(again, bundle=evolve(again.bundle, digests_after={}))
    rows = compare(bundle, again, others, judged, whole=is_whole)
    return Replay(rows=rows, trainer=plan.chosen["trainer"].label, dtype=plan.model.dtype, device=plan.device, notes=plan.notes)
