"""Cutting a batch into microbatches of equal attention work.

The cost of a sequence of length l is l · (1 + l / c): c is where attention costs as much as the linear layers. For a dense
decoder of width h a layer takes about 24·h² FLOPs a token in its linear maps and 2·h·l in causal attention, so c = 12·h.
"""

import heapq
from bisect import bisect_left, insort

import numpy as np

from rlcore.spi.arrays import Int64Array

ATTENTION_CROSSOVER_TOKENS = 12 * 4096


def plan_microbatches(lengths: Int64Array, *, max_tokens: int) -> list[Int64Array]:
    """Microbatches in order of falling cost, each an ascending int64 array of sequence numbers.

    `lengths` is int64 [N], tokens per sequence, N at least 1. No microbatch exceeds `max_tokens`, except that a longer sequence
    gets one of its own. There are as many as best-fit decreasing needs, or fewer. Where the tokens leave the room, they are
    balanced by longest processing time first, within 4/3 of the best (Graham 1969); where they do not, best-fit decreasing
    itself decides, since a microbatch more costs more than an uneven one.
    """
    costs = lengths * (1.0 + lengths / ATTENTION_CROSSOVER_TOKENS)
    order = np.argsort(-costs, kind="stable").tolist()
    tightest = _best_fit(lengths.tolist(), order, max_tokens)
    counts = {min(len(tightest), -(-int(lengths.sum()) // max_tokens)), len(tightest)}
    balanced = (_fill(lengths.tolist(), costs.tolist(), order, count, max_tokens) for count in sorted(counts))
    bins = next((found for found in balanced if found is not None), tightest)
    bins.sort(key=lambda members: -float(costs[members].sum()))
    return [np.sort(np.asarray(members, np.int64)) for members in bins]


def _best_fit(lengths: list[int], order: list[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sequence goes where the least room is left over, or opens another bin."""
    members: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens left and bin, ascending
    for sequence in order:
        place = bisect_left(room, (lengths[sequence], -1))
        if place == len(room):
            left, index = max_tokens, len(members)
            members.append([])
        else:
            left, index = room.pop(place)
        members[index].append(sequence)
        insort(room, (left - lengths[sequence], index))
    return members


def _fill(lengths: list[int], costs: list[float], order: list[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """The sequences in `num_bins` bins, none of them empty, or None where their tokens do not fit."""
    members: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    for sequence in order:
        full = []
        while heap and members[heap[0][1]] and tokens[heap[0][1]] + lengths[sequence] > max_tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, index = heap[0]
        heapq.heapreplace(heap, (load + costs[sequence], index))
        members[index].append(sequence)
        tokens[index] += lengths[sequence]
        for entry in full:
            heapq.heappush(heap, entry)
    return members
