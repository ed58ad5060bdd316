"""Log-probabilities of sampled tokens, kept on the device until their sample ends.

vLLM sends them to the host with every step: a copy, an object per token, and a third of the throughput. Here the sampler's
result is normalised by one kernel and written into a table, of which a row is fetched once. For vLLM's model runner V2.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi.arrays import Float32Array
from rlcore_vllm.setup.memory import recorder_bytes, recorder_ended


@frozen(kw_only=True)
class RecordedRequest:
    """The tokens of one request whose log-probabilities are fetched."""

    request: str
    """vLLM's own name of the request in its core."""
    prompt_length: int
    num_tokens: int


def record(runner: Any) -> "LogprobRecorder | None":
    """Start recording in a worker's model runner, or None where it samples in another way than model runner V2."""
    return LogprobRecorder(runner) if can_record(runner) else None


def can_record(runner: Any) -> bool:
    """Return whether it samples as model runner V2 does, one token of a request at a time."""
    sampler, speculative = getattr(runner, "sampler", None), getattr(runner, "rejection_sampler", None)
    if sampler is None or speculative is not None or not (hasattr(runner, "req_states") and hasattr(runner, "_remove_request")):
        return False
    return {"expanded_idx_mapping", "pos"} <= inspect.signature(sampler.sample).parameters.keys()


def most_bytes(runner: Any) -> int:
    """Return the most bytes of the device that a recorder of this runner may take; 0 where there will be none."""
    return recorder_bytes(runner.max_num_reqs, runner.max_model_len) if can_record(runner) else 0


class LogprobRecorder:
    """A table float32 [slots, positions] beside the runner's own states: each token by the position of the one before it.

    It keeps the rows of slots that change hands for expected requests alone, until they are fetched or forgotten.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._states = runner, runner.req_states
        self._table: Tensor | None = None
        self._expected: dict[str, int] = {}
        """Requests that are going to be fetched, with the positions that they may fill."""
        self._kept: dict[str, Tensor] = {}
        """The record of a request in slots that it has given up, float32 [positions], by request."""
        self._sample, self._remove = runner.sampler.sample, runner._remove_request
        self._signature = inspect.signature(self._sample)
        replace_sample(runner.sampler, self._sample_and_record)
        runner._remove_request = self._keep_and_remove
        self.reserve()

    @property
    def most_ended(self) -> int:
        """Samples that may have ended before those that have are fetched."""
        return recorder_ended(self._runner.max_num_reqs)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that the recorder holds now."""
        held = [*self._kept.values(), *([] if self._table is None else [self._table])]
        return sum(row.untyped_storage().nbytes() for row in held)

    def reserve(self) -> None:
        """Take the table's memory, where it is not taken yet."""
        if self._table is None:
            # The row beyond the last is that of slot -1, by which vLLM marks rows of logits that belong to no request.
            shape = self._runner.max_num_reqs + 1, self._runner.max_model_len
            self._table = torch.zeros(shape, device=self._runner.device)

    def release(self) -> None:
        """Give all memory back while nothing is in the making; `reserve` takes it again."""
        self._table = None
        self._expected.clear()
        self._kept.clear()

    def expect(self, request: str, most_tokens: int) -> None:
        """Keep what is recorded for a request of at most so many tokens with its prompt, until it is fetched or forgotten."""
        self._expected[request] = most_tokens

    def fetch(self, requests: Sequence[RecordedRequest]) -> list[Float32Array]:
        """float32 [num_tokens] for each request, which has ended; nothing of it is kept. Waits for the device once."""
        return split(self.fetch_joined(requests), requests) if requests else []

    def fetch_joined(self, requests: Sequence[RecordedRequest]) -> Float32Array:
        """As `fetch`, one request after another in one array; at least one of them."""
        rows = [self._part(one) for one in requests]
        self.forget([one.request for one in requests])
        joined: Float32Array = torch.cat(rows).cpu().numpy()
        return joined

    def forget(self, requests: Iterable[str]) -> None:
        """Keep nothing of these, such as samples that were cut."""
        for request in requests:
            self._expected.pop(request, None)
            self._kept.pop(request, None)

    def _part(self, one: RecordedRequest) -> Tensor:
        if not one.num_tokens:
            return torch.zeros(0, device=self._runner.device)
        row = self._row(one.request)
        if row is None:
            raise RuntimeError(f"no log-probabilities were recorded for request {one.request}")
        first = one.prompt_length - 1
        return row[first : first + one.num_tokens]

    def _row(self, request: str) -> Tensor | None:
        """Return the whole record of a request. After a preemption it goes on in another slot, from where it was."""
        earlier = self._kept.get(request)
        if request not in self._states.req_id_to_index or self._table is None:
            return earlier
        slot = self._states.req_id_to_index[request]
        present = self._table[slot]
        if earlier is None:
            return present
        start = int(self._states.prefill_len.np[slot]) - 1
        return torch.cat([earlier[:start], present[start : len(earlier)]])

    def _sample_and_record(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        sampled, logits = self._sample(*args, **kwargs)
        if self._table is not None:
            arguments = self._signature.bind(*args, **kwargs).arguments
            self._table[arguments["expanded_idx_mapping"], arguments["pos"]] = logprobs_of(logits, sampled)
        return sampled, logits

    def _keep_and_remove(self, request: str) -> bool:
        if request in self._expected:
            row = self._row(request)
            if row is not None:
                # A copy: the slot is another's soon.
                self._kept[request] = row[: self._expected[request]].clone()
        return bool(self._remove(request))


def split(joined: Float32Array, requests: Sequence[RecordedRequest]) -> list[Float32Array]:
    """The part of each request in what was fetched of them together."""
    return list(np.split(joined, np.cumsum([one.num_tokens for one in requests])[:-1]))


def replace_sample(sampler: Any, function: Callable[..., Any]) -> None:
    """Have a sampler sample by `function`, which still shows the arguments of what it replaces: recorders go by their names."""

    @wraps(sampler.sample)
    def sample(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    sampler.sample = sample


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """float32 [B]: log-softmax of `logits` [B, V], truncated ones -inf, at `tokens` int64 [B]."""
    return _implementation(logits.device.type)(logits, tokens)


def _implementation(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    return _in_one_pass if device == "cuda" else _by_log_softmax


def _by_log_softmax(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, tokens[:, None])[:, 0]


def _in_one_pass(logits: Tensor, tokens: Tensor) -> Tensor:
    from rlcore_torchkit.head.softmax_kernels import normalise

    logprobs = torch.empty(len(logits), device=logits.device)
    if len(logits):
        normalise(logits, tokens, 1.0, logprobs, torch.empty_like(logprobs), None)
    return logprobs
