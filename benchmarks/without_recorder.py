"""vLLM's worker with rlcore's extension, but for the recorder of log-probabilities: they then come to the host with every step.

Imported in each rank of an engine by rows of `generation.py`, to measure what the recorder saves.
"""

from collections.abc import Sequence
from typing import Any

from rlcore_vllm.engines.rank_recorders import Order
from rlcore_vllm.ranks.worker import WorkerExtension


class WithoutRecorder(WorkerExtension):
    """An engine of several ranks finds no recorder in them."""

    def rlcore_record(self, rank: int, orders: Sequence[Order]) -> dict[str, Any]:
        if any(recorder == "logprobs" for recorder, *_ in orders):
            return {"answer": False}
        return super().rlcore_record(rank, orders)
