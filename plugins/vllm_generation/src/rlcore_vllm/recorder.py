"""Log-probabilities of sampled tokens, kept on the device until their sample ends.

vLLM sends them to the host with every step: a copy, an object per token, and a third of the throughput. Here the sampler's
result is normalised by one kernel and written into a table, of which a row is fetched once. For vLLM's model runner V2.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi.arrays import Float32Array


@frozen(kw_only=True)
class Sampled:
    """Which of a request's tokens are asked for."""

    request: str
    """vLLM's own name of the request in its core."""
    prompt_length: int
    num_tokens: int


def record(runner: Any) -> "LogprobRecorder | None":
    """Start recording in a worker's model runner, or None where it samples in another way than model runner V2."""
    sampler, speculative = getattr(runner, "sampler", None), getattr(runner, "rejection_sampler", None)
    if sampler is None or speculative is not None or not (hasattr(runner, "req_states") and hasattr(runner, "_remove_request")):
        return None
    if not {"expanded_idx_mapping", "pos"} <= inspect.signature(sampler.sample).parameters.keys():
        return None
    return LogprobRecorder(runner)


class LogprobRecorder:
    """A table float32 [slots, positions] beside the runner's own states: each token by the position of the one before it."""

    def __init__(self, runner: Any) -> None:
        self._states = runner.req_states
        # The row beyond the last is that of slot -1, by which vLLM marks rows of logits that belong to no request.
        self._table = torch.zeros(runner.max_num_reqs + 1, runner.max_model_len, device=runner.device)
        self._ended: dict[str, list[tuple[int, Tensor]]] = {}
        """By request: rows of slots that it has given up, each with the first position that it filled."""
        self._sample, self._remove = runner.sampler.sample, runner._remove_request
        self._signature = inspect.signature(self._sample)
        runner.sampler.sample, runner._remove_request = self._sample_and_record, self._keep_and_remove

    def fetch(self, requests: Sequence[Sampled]) -> list[Float32Array]:
        """float32 [num_tokens] for each request, which has ended; nothing of it is kept. Waits for the device once."""
        rows = [self._row(one) for one in requests]
        if not rows:
            return []
        joined = torch.cat(rows).cpu().numpy()
        return list(np.split(joined, np.cumsum([one.num_tokens for one in requests])[:-1]))

    def forget(self) -> None:
        """Drop what nobody asked for, such as samples that were cut."""
        self._ended.clear()

    def _row(self, one: Sampled) -> Tensor:
        pieces = self._ended.pop(one.request, [])
        if one.request in self._states.req_id_to_index:  # has ended, but its slot is not free yet
            pieces.append(self._present(one.request))
        if not pieces:
            raise RuntimeError(f"no log-probabilities were recorded for request {one.request}")
        # After a preemption the request goes on in another slot, from where it was.
        row = pieces[0][1]
        for start, later in pieces[1:]:
            row = torch.cat([row[:start], later[start:]])
        first = one.prompt_length - 1
        return row[first : first + one.num_tokens]

    def _present(self, request: str) -> tuple[int, Tensor]:
        slot = self._states.req_id_to_index[request]
        return int(self._states.prefill_len.np[slot]) - 1, self._table[slot].clone()

    def _sample_and_record(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        sampled, logits = self._sample(*args, **kwargs)
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._table[arguments["expanded_idx_mapping"], arguments["pos"]] = logprobs_of(logits, sampled)
        return sampled, logits

    def _keep_and_remove(self, request: str) -> bool:
        if request in self._states.req_id_to_index:
            self._ended.setdefault(request, []).append(self._present(request))
        return bool(self._remove(request))


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """float32 [B]: log-softmax of `logits` [B, V], truncated ones -inf, at `tokens` int64 [B]."""
    return _implementation(logits.device.type)(logits, tokens)


def _implementation(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    return _in_one_pass if device == "cuda" else _by_log_softmax


def _by_log_softmax(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, tokens[:, None])[:, 0]


def _in_one_pass(logits: Tensor, tokens: Tensor) -> Tensor:
    from rlcore.torchkit.softmax_kernels import normalise

    logprobs = torch.empty(len(logits), device=logits.device)
    if len(logits):
        normalise(logits, tokens, 1.0, logprobs, torch.empty_like(logprobs), None)
    return logprobs
