"""A sample in the making, and the generate call that it is of."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeAlias

import numpy as np

from rlcore.spi import FinishReason, SamplingMask
from rlcore.spi.arrays import AnyArray
from rlcore_torchkit.generation import FinishedSample
from rlcore_vllm.engines.routing import reported_experts
from rlcore_vllm.engines.sampling import OnTokens

Deliver: TypeAlias = Callable[[Sequence[FinishedSample]], None]


class Job:
    """The samples of one generate call."""

    def __init__(self, deliver: Deliver, num_samples: int, on_tokens: OnTokens | None = None) -> None:
        self.deliver = deliver
        self.on_tokens = on_tokens
        self.num_left = num_samples
        self.done: Future[None] = Future()

    def hand_out(self, finished: Sequence[FinishedSample]) -> None:
        """Deliver the samples that have ended."""
        self.num_left -= len(finished)
        self.deliver(finished)
        if not self.num_left:
            settle(self.done, None)


class Sample:
    """A sample in the making."""

    __slots__ = (
        "adapter",
        "detokenizer",
        "is_masked",
        "job",
        "limit",
        "logprobs",
        "mask",
        "number",
        "prompt_length",
        "read",
        "reason",
        "routed",
        "spans",
        "tokens",
    )

    def __init__(self, job: Job, number: int, prompt_length: int, limit: int, weight_version: int, adapter: int = 0) -> None:
        self.job = job
        self.adapter = adapter
        """The engine's number of the adapter that samples it."""
        self.number = number
        self.prompt_length = prompt_length
        self.limit = limit
        self.tokens: list[int] = []
        self.logprobs: Any = []
        self.reason = FinishReason.ABORTED
        self.spans = [(0, weight_version)]
        """(first token, version) of each span of equal weight versions."""
        self.detokenizer: Any = None
        """Looks for stop strings; None where there are none."""
        self.routed: list[AnyArray] | None = None
        """Experts of its tokens, as they come; None where they are not asked for."""
        self.is_masked = False
        """True where what its tokens are sampled among is noted; and that, once it has ended."""
        self.mask: SamplingMask | None = None
        self.read: int | None = None
        """Samples.read of it."""

    def change_version(self, weight_version: int) -> None:
        """Tokens from here on are sampled under another version."""
        if self.spans[-1][0] == len(self.tokens):
            self.spans.pop()
        self.spans.append((len(self.tokens), weight_version))

    def finish(self) -> FinishedSample:
        """The sample as it is handed out."""
        ends = [*(start for start, _ in self.spans[1:]), len(self.tokens)]
        lengths = [end - start for (start, _), end in zip(self.spans, ends, strict=True)]
        num_tokens = self.prompt_length + len(self.tokens)
        return FinishedSample(
            number=self.number,
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            weight_versions=np.repeat(np.array([version for _, version in self.spans], np.int32), lengths),
            finish_reason=self.reason,
            routed_experts=None if self.routed is None else reported_experts(self.routed, num_tokens),
            sampling_mask=self.mask,
        )


def settle(future: Future[Any], error: BaseException | None) -> None:
    """End a future that its owner may have cancelled, or that has failed."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
