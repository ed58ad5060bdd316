"""From the request's sampling to SGLang's, and from its finish reasons back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlcore.spi import FinishReason, SamplingParams

SMALLEST_TEMPERATURE = 1e-5
"""SGLang takes the most probable token below 1e-6."""


def engine_sampling(sampling: SamplingParams, limit: int) -> dict[str, Any]:
    """SGLang's sampling parameters of one sample."""
    return {
        "max_new_tokens": limit,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        # True would have it look past the stop tokens too; the model's own are taken from it by `scheduler`.
        "ignore_eos": False,
        "no_stop_trim": True,
    }


def finish_reason(reason: Mapping[str, Any] | None, tokens: Sequence[int], limit: int, stops: Collection[int]) -> FinishReason:
    """SGLang's finish reason as ours; a sample that was cut before its whole limit is never called finished or full."""
    kind = None if reason is None else reason.get("type")
    if kind == "stop":
        return FinishReason.STOP
    if kind == "length" and len(tokens) == limit:
        # Some versions look at the limit first.
        return FinishReason.STOP if tokens[-1] in stops else FinishReason.LENGTH
    return FinishReason.ABORTED
