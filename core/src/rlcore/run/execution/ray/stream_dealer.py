"""Dealing the requests of a stream to the hosts of a pool."""

import threading
from collections.abc import Sequence

import numpy as np

from rlcore.run.execution.ray.dispatch import request_for, samples_of
from rlcore.run.execution.ray.worker_stream import NumberedRequest
from rlcore.spi import GenerateRequest
from rlcore.spi.arrays import Int64Array

STICKINESS = 0.125
"""How much more a host may have to do than another one, as a share of that, and still be given a conversation that it had."""
MAX_CONVERSATIONS = 2**17
"""Conversations that a stream remembers the host of."""


class StreamDealer:
    """Gives each prompt, with all its samples, to the host with the least work under way, or to the one that has had its
    conversation, unless that has clearly more to do.

    Work is counted in tokens at the samples' limits, for how long they will be is not known. Of a request, prompts of more work
    are dealt first. Samples are numbered in the order of being dealt.
    """

    def __init__(self, num_hosts: int) -> None:
        self._lock = threading.Lock()
        self._limits: list[dict[int, int]] = [{} for _ in range(num_hosts)]
        """By host: the limits of its samples, by their numbers."""
        self._work = [0] * num_hosts
        self._places: dict[int, int] = {}
        """The host that each conversation was last on, the oldest first."""
        self._num_samples = 0

    def deal(self, request: GenerateRequest) -> dict[int, NumberedRequest]:
        """What each host gets of a request; hosts that get nothing are left out."""
        num_prompts = request.prompts.num_sequences
        work = request.max_tokens.reshape(num_prompts, request.num_samples).sum(axis=1, dtype=np.int64)
        host_of = np.empty(num_prompts, np.int64)
        numbers = np.full(len(request.seeds), -1) if request.conversations is None else request.conversations
        talks = numbers.reshape(num_prompts, request.num_samples).tolist()
        with self._lock:
            totals = list(self._work)
            for prompt in np.argsort(-work, kind="stable").tolist():
                host = self._host_for(talks[prompt], int(work[prompt]), totals)
                host_of[prompt] = host
                totals[host] += int(work[prompt])
            chosen = sorted(set(host_of.tolist()), key=totals.__getitem__)
            dealt = {host: self._number(request, host, np.flatnonzero(host_of == host)) for host in chosen}
            self._num_samples += len(request.seeds)
        return {host: numbered for host, numbered in dealt.items() if len(numbered[0])}

    def done(self, host: int, samples: Int64Array) -> None:
        """Samples of a host, int64 [M], are under way no longer."""
        with self._lock:
            self._work[host] -= sum(map(self._limits[host].pop, samples.tolist()))

    def is_busy(self, host: int) -> bool:
        """Whether a host has samples under way."""
        return bool(self._limits[host])

    def _host_for(self, talks: Sequence[int], work: int, totals: Sequence[int]) -> int:
        """The host of a prompt whose samples belong to these conversations, by the work that each host will have."""
        least = min(totals)
        host = self._places.get(talks[0]) if talks and talks[0] >= 0 else None
        if host is None or totals[host] > least + least * STICKINESS + work:
            host = totals.index(least)
        for talk in talks:
            if talk >= 0:
                self._places.pop(talk, None)
                self._places[talk] = host
        while len(self._places) > MAX_CONVERSATIONS:
            del self._places[next(iter(self._places))]
        return host

    def _number(self, request: GenerateRequest, host: int, prompts: Int64Array) -> NumberedRequest:
        part = request_for(request, prompts)
        numbers = self._num_samples + samples_of(request, prompts)
        self._limits[host] |= dict(zip(numbers.tolist(), part.max_tokens.tolist(), strict=True))
        self._work[host] += int(part.max_tokens.sum(dtype=np.int64))
        return numbers, part
