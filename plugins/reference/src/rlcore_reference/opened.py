"""Opens the reference of a run: asked once for each row of a data set, or while samples come in on devices of its own."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from attrs import frozen

from rlcore.run.plan.algorithm_rules import replays_sampling_mask
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.train_step.scorers import OnTokens, Reference
from rlcore.spi import TokenBatch
from rlcore.spi.arrays import Float32Array, Int64Array
from rlcore.spi.execution import TrainerGroup
from rlcore_reference.ahead import ReferenceAhead
from rlcore_reference.store import ReferenceStore


@contextmanager
def cached_reference(
    plan: RunPlan, reference: Reference, *, directory: Path, model_digest: str, note: Callable[[str], None]
) -> Iterator[Reference]:
    """Yield the reference of a run, whose model has that digest, with a store or a thread where the run has a use for it."""
    if plan.algorithm.needs.source != "rollouts":
        with ReferenceStore.open(directory, reference_identity(plan, model_digest), note) as store:
            yield StoredReference(group=reference.group, is_apart=reference.is_apart, store=store)
        return
    keeps = batches_kept(plan)
    if keeps is None:
        yield reference
        return

    def compute(batch: TokenBatch) -> Float32Array:
        return reference.logprobs(batch, np.arange(batch.num_sequences), 0)

    with closing(ReferenceAhead(compute, keeps=keeps)) as ahead:
        yield ReferenceAskedAhead(group=reference.group, is_apart=reference.is_apart, ahead=ahead)


@frozen(kw_only=True, eq=False)
class StoredReference(Reference):
    """A reference that is asked once for each sequence of a data set."""

    store: ReferenceStore

    def is_beside(self, trainer: TrainerGroup) -> bool:  # noqa: ARG002 - the file comes first
        """See Reference."""
        return False

    def of_batch(self, batch: TokenBatch, weight_version: int) -> Float32Array:
        """See Reference."""
        return self.store.logprobs(batch, partial(self.logprobs, batch, weight_version=weight_version))


@frozen(kw_only=True, eq=False)
class ReferenceAskedAhead(Reference):
    """A reference on devices of its own that is asked while samples come in."""

    ahead: ReferenceAhead

    @property
    def on_tokens(self) -> OnTokens:
        """See Reference."""
        return self.ahead.add

    def logprobs(self, batch: TokenBatch, sequences: Int64Array, weight_version: int) -> Float32Array:  # noqa: ARG002
        """See Reference."""
        return self.ahead.logprobs(batch, sequences)


def batches_kept(plan: RunPlan) -> int | None:
    """Return how many batches a sequence stays known for where the reference is asked while samples come in; None where it is
    asked once they are there: by the trainer's own ranks, with what the samples were chosen among, or behind other prompts."""
    algorithm = plan.algorithm
    if not plan.reference_is_apart or algorithm.reprompts or replays_sampling_mask(plan.recipe, algorithm.needs):
        return None
    return plan.recipe.async_.max_staleness + 1


def reference_identity(plan: RunPlan, model_digest: str) -> str:
    """Return what the reference's log-probabilities depend on besides the tokens."""
    parts = (
        model_digest,
        plan.model.dtype,
        plan.recipe.rollout.temperature,
        plan.chosen["trainer"].name,
        plan.reference_config,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
