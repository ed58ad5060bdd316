"""Routes requests of a stream to the least loaded engine of a pool."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from rlcore.spi import GenerateRequest, WorkerError
from rlcore.spi.arrays import BoolArray, Int64Array
from rlcore_ray.dispatch import request_for, request_of_samples, samples_of
from rlcore_ray.worker_stream import NumberedRequest

STICKINESS = 0.125
"""Surplus of work, as a share of another host's, with which a host is still given a conversation that it had."""
MAX_CONVERSATIONS = 2**17
"""Conversations that a stream remembers the host of."""


class RequestRouter:
    """Routes each prompt, with all its samples, to the least loaded host, or to that of its conversation unless it has clearly
    more.

    Work is counted in tokens at the samples' limits, for how long they will be is not known. Of a request, prompts of more work
    are dealt first. Samples are numbered in the order of being dealt. A host is dealt to from `join` on until `leave`.
    """

    def __init__(self, num_hosts: int) -> None:
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._under_way: list[dict[int, tuple[int, NumberedRequest]]] = [{} for _ in range(num_hosts)]
        """By host: the limits of its samples, by their numbers, each with what it was dealt in."""
        self._work = [0] * num_hosts
        self._places: dict[int, int] = {}
        """The host that each conversation was last on, the oldest first."""
        self._num_samples = 0

    def join(self, host: int) -> None:
        """Deal to a host from now on."""
        with self._lock:
            self._joined.add(host)

    def has(self, host: int) -> bool:
        """Return whether requests are routed to a host."""
        return host in self._joined

    def retire(self, host: int) -> None:
        """Route nothing more to a host, which keeps what it has."""
        with self._lock:
            self._joined.discard(host)

    def leave(self, host: int) -> list[NumberedRequest]:
        """Route nothing more to a host. Returns its unfinished work: whole prompts, and samples of others each with its own
        prompt."""
        with self._lock:
            self._joined.discard(host)
            under_way, self._under_way[host], self._work[host] = self._under_way[host], {}, 0
        left = []
        for numbers, request in {id(dealt): dealt for _, dealt in under_way.values()}.values():
            is_left = np.array([number in under_way for number in numbers.tolist()])
            left += [(numbers[samples], part) for samples, part in _left(request, is_left)]
        return left

    def dispatch(self, request: GenerateRequest, numbers: Int64Array | None = None) -> dict[int, NumberedRequest]:
        """Return each host's part of a request; hosts that get nothing are left out. `numbers` int64 [S] are those of samples
        that were dealt before. WorkerError where no host has joined."""
        num_prompts = request.prompts.num_sequences
        work = request.max_tokens.reshape(num_prompts, request.num_samples).sum(axis=1, dtype=np.int64)
        host_of = np.empty(num_prompts, np.int64)
        conversations = np.full(len(request.seeds), -1) if request.conversations is None else request.conversations
        talks = conversations.reshape(num_prompts, request.num_samples).tolist()
        with self._lock:
            if not self._joined:
                raise WorkerError("stream: no engine is left to send samples to")
            totals = {host: self._work[host] for host in self._joined}
            idlest = sorted((work, host) for host, work in totals.items())
            if numbers is None:
                numbers = self._num_samples + np.arange(len(request.seeds))
                self._num_samples += len(request.seeds)
            for prompt in np.argsort(-work, kind="stable").tolist():
                while totals[idlest[0][1]] != idlest[0][0]:  # it was given more since
                    heappop(idlest)
                host = self._host_for(talks[prompt], int(work[prompt]), totals, idlest[0][1])
                host_of[prompt] = host
                totals[host] += int(work[prompt])
                heappush(idlest, (totals[host], host))
            chosen = sorted(set(host_of.tolist()), key=totals.__getitem__)
            dealt = {host: self._number(request, numbers, host, np.flatnonzero(host_of == host)) for host in chosen}
        return {host: numbered for host, numbered in dealt.items() if len(numbered[0])}

    def done(self, host: int, samples: Int64Array) -> None:
        """Samples of a host, int64 [M], are under way no longer."""
        with self._lock:
            self._work[host] -= sum(self._under_way[host].pop(sample)[0] for sample in samples.tolist())

    def is_busy(self, host: int) -> bool:
        """Return whether a host has samples under way."""
        return bool(self._under_way[host])

    def _host_for(self, talks: Sequence[int], work: int, totals: Mapping[int, int], idlest: int) -> int:
        """Return the host of a prompt of these conversations, by each host's work to come, of which `idlest` has the least."""
        least = totals[idlest]
        host = self._places.get(talks[0]) if talks and talks[0] >= 0 else None
        if host is None or host not in totals or totals[host] > least + least * STICKINESS + work:
            host = idlest
        for talk in talks:
            if talk >= 0:
                self._places.pop(talk, None)
                self._places[talk] = host
        while len(self._places) > MAX_CONVERSATIONS:
            del self._places[next(iter(self._places))]
        return host

    def _number(self, request: GenerateRequest, numbers: Int64Array, host: int, prompts: Int64Array) -> NumberedRequest:
        dealt = numbers[samples_of(request, prompts)], request_for(request, prompts)
        limits = dealt[1].max_tokens
        self._under_way[host] |= {
            number: (limit, dealt) for number, limit in zip(dealt[0].tolist(), limits.tolist(), strict=True)
        }
        self._work[host] += int(limits.sum(dtype=np.int64))
        return dealt


def _left(request: GenerateRequest, is_left: BoolArray) -> Iterator[tuple[Int64Array, GenerateRequest]]:
    """The samples of a request that are left, bool [S], by their numbers in it, int64 [M]: of whole prompts, and of others."""
    whole = is_left.reshape(-1, request.num_samples).all(axis=1)
    if whole.any():
        prompts = np.flatnonzero(whole)
        yield samples_of(request, prompts), request_for(request, prompts)
    others = np.flatnonzero(is_left & ~np.repeat(whole, request.num_samples))
    if len(others):
        yield others, request_of_samples(request, others)
