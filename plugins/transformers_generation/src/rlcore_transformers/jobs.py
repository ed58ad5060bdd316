"""Requests under way: which of their samples wait for a place, and what went through the model for them already."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from attrs import frozen
from torch import Tensor

from rlcore.spi import FinishReason, GenerateRequest, SamplingMask, TokenReader
from rlcore.spi.arrays import Int16Array, Int32Array, Int64Array, offsets_of
from rlcore_torchkit.generation import FinishedSample
from rlcore_transformers.attention import PromptAttention


class Routing:
    """Room for every token that a request may come to, -1 until it has been routed."""

    def __init__(self, request: GenerateRequest, limits: Int64Array, shape: tuple[int, int]) -> None:
        """`limits` int64 [S]: most tokens of each sample; `shape`: L and K."""
        self._num_samples = request.num_samples
        self._prompt_lengths = request.prompts.lengths
        self._offsets = offsets_of(np.repeat(self._prompt_lengths, request.num_samples) + limits)
        self._experts = np.full((int(self._offsets[-1]), *shape), -1, np.int16)

    def add_prompts(self, prompts: Int64Array, experts: Int16Array) -> None:
        """Note the experts int16 [prompts, length, L, K] of the prompts with these numbers, padded on the right."""
        for prompt, rows in zip(prompts.tolist(), experts, strict=True):
            length = int(self._prompt_lengths[prompt])
            for start in self._offsets[prompt * self._num_samples : (prompt + 1) * self._num_samples].tolist():
                self._experts[start : start + length] = rows[:length]

    def add_tokens(self, samples: Int64Array, positions: Int64Array, experts: Int16Array) -> None:
        """Note the experts of one token of each of `samples`, int16 [samples, L, K], at these positions of their sequences."""
        self._experts[self._offsets[samples] + positions] = experts

    def result(self, sample: int, length: int) -> Int16Array:
        """int16 [prompt and length, L, K]: the experts of a sample that has `length` tokens after its prompt."""
        start, prompt = self._offsets[sample], self._prompt_lengths[sample // self._num_samples]
        return self._experts[start : start + prompt + length].copy()


Deliver: TypeAlias = Callable[[Sequence[FinishedSample]], None]


@frozen(eq=False)
class Prefilled:
    """Prompts that went through the model, and the samples of theirs that have no place yet."""

    attention: PromptAttention
    logits: Tensor
    """[prompts, V] after each prompt's last token."""
    rows: Int64Array
    """int64 [samples]: the prompt, by its row here."""
    samples: Int64Array
    """int64 [samples]: the sample's number in the request."""

    def take(self, count: int) -> tuple["Prefilled", "Prefilled"]:
        """The first `count` samples, and the rest."""
        first = Prefilled(self.attention, self.logits, self.rows[:count], self.samples[:count])
        return first, Prefilled(self.attention, self.logits, self.rows[count:], self.samples[count:])


class Job:
    """A request whose samples wait or run."""

    def __init__(self, request: GenerateRequest, limits: Int64Array, deliver: Deliver, routing: Routing | None) -> None:
        """`limits` int64 [S]: most tokens of each sample."""
        self.request = request
        self.limits = limits
        self.deliver = deliver
        self.routing = routing
        self.prompt_lengths = request.prompts.lengths
        self.waiting = np.argsort(-self.prompt_lengths, kind="stable")
        """int64: prompts that have not gone through the model, the longest first."""
        self.prefilled: Prefilled | None = None
        self.kept: dict[int, list[Int32Array]] | None = {} if request.sampling_mask else None
        """By sample, what its tokens were chosen among so far; None where nobody wants to know."""

    def reader_of(self, sample: int) -> TokenReader | None:
        """Return the reader of a sample's tokens, if it has one."""
        return None if self.request.readers is None else self.request.readers[sample]

    def note_kept(self, sample: int, tokens: Int32Array) -> None:
        """Note what one more token of a sample was chosen among, if anybody wants to know."""
        if self.kept is not None:
            self.kept.setdefault(sample, []).append(tokens)

    def take_mask(self, sample: int) -> SamplingMask | None:
        """Return the tokens that a sample's were chosen among; None where the request does not ask, or nothing was left out."""
        found = None if self.kept is None else self.kept.pop(sample, None)
        return None if found is None else SamplingMask.of(found)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence, at the samples' limits."""
        return int((np.repeat(self.prompt_lengths, self.request.num_samples) + self.limits).max())

    @property
    def has_waiting(self) -> bool:
        """True where a sample of it has no place yet."""
        return bool(self.waiting.size) or self.prefilled is not None

    def unbegun(self) -> list[FinishedSample]:
        """The samples that have no place yet, cut."""
        num_samples = self.request.num_samples
        waiting = (self.waiting[:, None] * num_samples + np.arange(num_samples)).flatten()
        samples = waiting if self.prefilled is None else np.concatenate([self.prefilled.samples, waiting])
        return [
            FinishedSample(
                number=sample,
                tokens=np.zeros(0, np.int32),
                logprobs=np.zeros(0, np.float32),
                weight_versions=np.zeros(0, np.int32),
                finish_reason=FinishReason.ABORTED,
                routed_experts=None if self.routing is None else self.routing.result(sample, 0),
            )
            for sample in samples.tolist()
        ]


def hand_out(finished: Sequence[tuple[Job, FinishedSample]]) -> None:
    """Deliver samples, those of a request together."""
    by_job: dict[int, tuple[Job, list[FinishedSample]]] = {}
    for job, sample in finished:
        by_job.setdefault(id(job), (job, []))[1].append(sample)
    for job, samples in by_job.values():
        job.deliver(samples)
