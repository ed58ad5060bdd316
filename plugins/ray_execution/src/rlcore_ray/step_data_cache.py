"""Keeps a rank's part of a step's data, so that the driver sends it once for log-probabilities and updates."""

from attrs import frozen

from rlcore.execution import TrainerHandle, per_token_results, read_by, without_columns
from rlcore.spi import LogprobsRequest, LossSpec, TokenBatch
from rlcore.spi.arrays import Int64Array
from rlcore_ray.dispatch import Dispatch, RankPart


@frozen(kw_only=True, eq=False)
class CachedMinibatch:
    """A minibatch of the step that the ranks hold, as the driver knows it."""

    number: int
    dispatch: Dispatch
    """The sequences of a minibatch that each rank has."""


@frozen(kw_only=True, eq=False)
class CachedColumn:
    """Log-probabilities that a rank computes for the updates of a step."""

    name: str
    """The token column."""
    request: LogprobsRequest
    """Without microbatches."""
    passes: Int64Array
    """int64 [P+1]: pass p is the rank's microbatches passes[p] to passes[p+1], which run as one; those before passes[0] have no
    log-probabilities."""


class StepDataCache:
    """A rank's data between the calls of a step: its microbatches of every update, with their log-probabilities."""

    def __init__(self, part: RankPart, updates: Int64Array) -> None:
        """`updates` is int64 [U+1]: update u is on the microbatches updates[u] to updates[u+1]."""
        self._part = part
        self._updates = updates

    def compute(self, handle: TrainerHandle, column: CachedColumn) -> None:
        """Add a column of log-probabilities."""
        request, passes = column.request, column.passes
        batches = self._part.microbatches(self._part.bounds[passes])
        found = per_token_results(handle, request, tuple(without_columns(batch, request.model) for batch in batches))
        self._part = self._part.with_token_column(column.name, found, int(passes[0]))

    def take(self, number: int, loss: LossSpec) -> tuple[TokenBatch, ...]:
        """The microbatches of an update, with the columns that its loss reads."""
        microbatches = slice(int(self._updates[number]), int(self._updates[number + 1]) + 1)
        return tuple(read_by(loss, batch) for batch in self._part.microbatches(self._part.bounds[microbatches]))

    def is_last(self, number: int) -> bool:
        """Return whether no update comes after this one."""
        return number + 2 == len(self._updates)
