"""The updates of a step: which sequences each is made on, cut into microbatches of equal attention work."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlcore import spi
from rlcore.config.recipe import Recipe
from rlcore.model_files import config_number
from rlcore.run.data.prompt_stream import RandomPurpose
from rlcore.spi.arrays import AnyArray, Int64Array, gather_ragged
from rlcore.spi.execution import Minibatch


def minibatches_of(training: spi.TrainingBatch, recipe: Recipe, step: int) -> list[Minibatch]:
    """Return the step's minibatches, without those that have no signal: AdamW would move the weights all the same, by its
    moments and its decay."""
    num_warmup_steps = 0 if recipe.critic is None else recipe.critic.warmup_steps
    batch, planned = training.batch, (step - 1 - num_warmup_steps) * recipe.training.updates_per_step
    num_loss_tokens = batch.loss_lengths
    counted = num_loss_tokens if training.has_signal is None else num_loss_tokens * training.has_signal
    return [
        Minibatch.of(batch, sequences, num_loss_tokens, planned + number)
        for number, sequences in enumerate(_sequences(batch, recipe, step))
        if counted[sequences].any()
    ]


def minibatches_with_signal(
    training: spi.TrainingBatch, recipe: Recipe, step: int, note: Callable[[str], None]
) -> list[Minibatch]:
    """The step's minibatches. None, with a note, or RewardError where the recipe wants that, for a step with nothing to learn
    from."""
    reason, minibatches = training.no_signal, list[Minibatch]()
    if reason is None and not training.batch.loss_mask.any():
        reason = "no token takes part in the loss"
    if reason is None:
        minibatches = minibatches_of(training, recipe, step)
        reason = None if minibatches else "no sequence that takes part in the loss has a signal"
    if reason is not None:
        message = f"step {step} has nothing to learn from: {reason}"
        if recipe.training.on_no_signal == "error":
            remedy = "Make the tasks easier or harder, raise rollout.samples_per_prompt, or set training.on_no_signal=skip."
            raise spi.RewardError(f"{message}. {remedy}")
        note(f"{message}; no update was made")
    return minibatches


def _sequences(batch: spi.TokenBatch, recipe: Recipe, step: int) -> list[Int64Array]:
    """The sequences of each update, epoch after epoch: whole groups, shuffled where an epoch has several updates."""
    num_updates, epochs = recipe.training.minibatches_per_step, range(recipe.training.epochs_per_step)
    if num_updates == 1:
        return [np.arange(batch.num_sequences) for _ in epochs]
    groups = batch.sequence_columns.get(spi.GROUP_IDS)
    if groups is None:
        raise spi.ContractError(
            f"the training batch lacks the sequence column {spi.GROUP_IDS}; expected the rollouts' columns kept"
        )
    random = np.random.default_rng([recipe.run.seed, RandomPurpose.MINIBATCHES, step])
    orders = [np.array_split(random.permutation(np.unique(groups)), num_updates) for _ in epochs]
    return [np.flatnonzero(np.isin(groups, group_ids)) for order in orders for group_ids in order]


Costs: TypeAlias = NDArray[np.float64]

WIDTH = 4096
"""Hidden size of a model of 8 billion parameters."""
MAX_WAITING = 0.02
"""Share of a step's work above which another microbatch a rank is cheaper than waiting."""


def model_width(model_path: str) -> int:
    """The hidden size that a local model's config.json states, a multimodal one's for its text; WIDTH where there is none."""
    return config_number(model_path, "hidden_size") or WIDTH


def sequence_costs(lengths: Int64Array, width: int = WIDTH) -> Costs:
    """float64 [N]: work of each sequence for a model of hidden size `width`, in units of a token's linear layers.

    The cost of a sequence of length l is l · (1 + l / c): c is where attention costs as much as the linear layers. For a dense
    decoder of width h a layer takes about 24·h² FLOPs a token in its linear maps and 2·h·l in causal attention, so c = 12·h.
    """
    return lengths * (1.0 + lengths / (12 * width))


def plan_microbatches(
    lengths: Int64Array, *, max_tokens: int, width: int = WIDTH, groups: Int64Array | None = None
) -> list[Int64Array]:
    """`plan_ranks` for a single rank: its microbatches in order of falling cost."""
    return plan_ranks(lengths, num_ranks=1, max_tokens=max_tokens, width=width, groups=groups)[0]


def group_offsets(group_ids: AnyArray) -> Int64Array:
    """int64 [G+1]: group g is the sequences group_offsets[g] to group_offsets[g+1], given the group of each, [N], N at least 1;
    those of a group are adjacent."""
    return np.concatenate([[0], np.flatnonzero(np.diff(group_ids)) + 1, [len(group_ids)]])


def plan_ranks(
    lengths: Int64Array, *, num_ranks: int, max_tokens: int, width: int = WIDTH, groups: Int64Array | None = None
) -> list[list[Int64Array]]:
    """The microbatches of each data-parallel rank, each an ascending int64 array of sequence numbers.

    `lengths` is int64 [N], tokens per sequence, N at least 1. No microbatch exceeds `max_tokens`, except that a longer sequence
    gets one of its own. Every rank has equally many, at least one: as few as the tokens allow, or one more where that brings
    waiting below 2%. Where there are fewer sequences than microbatches, some are empty: their ranks have to run something that
    counts in no loss. With `groups`, int64 [G+1] as of `group_offsets`, whole groups are dealt out in place of sequences.

    Ranks wait for each other in every layer of every microbatch, so all microbatches are made alike (longest processing time
    first, Graham 1969), and those that run at the same time are neighbours in cost. All waiting of a step together is then at
    most the difference between its heaviest and its lightest microbatch; so is the difference between two ranks' totals.
    """
    costs = sequence_costs(lengths, width)
    if groups is not None:
        costs, lengths = np.add.reduceat(costs, groups[:-1]), np.add.reduceat(lengths, groups[:-1])
    order = np.argsort(-lengths, kind="stable")
    bins, num_bins = _pack(lengths, costs, order, num_ranks, max_tokens)
    dealt, waiting = _deal(bins, costs, num_bins, num_ranks)
    if waiting > MAX_WAITING:
        more = _balanced(lengths, costs, order, num_bins + num_ranks, max_tokens)
        if more is not None:
            dealt_more, less_waiting = _deal(more, costs, num_bins + num_ranks, num_ranks)
            bins, dealt = (more, dealt_more) if less_waiting <= MAX_WAITING else (bins, dealt)
    members = np.split(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins, minlength=dealt.size))[:-1])
    if groups is not None:
        members = [gather_ragged(groups, numbers)[0] for numbers in members]
    return [[members[index] for index in rank] for rank in dealt.T.tolist()]


def _pack(lengths: Int64Array, costs: Costs, order: Int64Array, num_ranks: int, max_tokens: int) -> tuple[Int64Array, int]:
    """The microbatch of each sequence, and how many there are: a multiple of `num_ranks`.

    Best-fit decreasing decides where tokens leave too little room to balance: a microbatch more costs more than an uneven one.
    """
    fewest = _rounded_up(-(-int(np.minimum(lengths, max_tokens).sum()) // max_tokens), num_ranks)
    bins = _balanced(lengths, costs, order, fewest, max_tokens)
    if bins is not None:
        return bins, fewest
    tight = _best_fit(lengths.tolist(), order.tolist(), max_tokens)
    num_bins = _rounded_up(len(tight), num_ranks)
    bins = _balanced(lengths, costs, order, num_bins, max_tokens) if num_bins > fewest else None
    return (_spread(tight, costs, num_bins) if bins is None else bins), num_bins


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _balanced(lengths: Int64Array, costs: Costs, order: Int64Array, num_bins: int, max_tokens: int) -> Int64Array | None:
    """Bins of equal cost or, where tokens leave less room, of equal tokens; None where they do not fit that way either."""
    bins = _fill(lengths, costs, order, num_bins, max_tokens)
    return _fill(lengths, lengths.astype(np.float64), order, num_bins, max_tokens) if bins is None else bins


def _fill(lengths: Int64Array, weights: Costs, order: Int64Array, num_bins: int, max_tokens: int) -> Int64Array | None:
    """Longest processing time first: int64 [N], the bin of each sequence; None where their tokens do not fit.

    Many sequences at once: each of the next ones goes to the next lightest bin, until a bin filled meanwhile would be lighter.
    """
    if num_bins == 1:
        return np.zeros(len(lengths), np.int64) if len(lengths) == 1 or lengths.sum() <= max_tokens else None
    lengths, weights = lengths[order], weights[order]
    chosen = np.empty(len(order), np.int64)
    loads, room = np.zeros(num_bins), np.full(num_bins, max_tokens)
    done = 0
    while done < len(order):
        open_ = np.flatnonzero((room >= lengths[done]) | (loads == 0.0))
        if len(open_) == 0:
            return None
        before = loads[open_]
        lightest = np.argsort(before, kind="stable")[: len(order) - done]
        before = before[lightest]
        after = before + weights[done : done + len(lightest)]
        overtaken = before[1:] > np.minimum.accumulate(after)[:-1]
        count = int(overtaken.argmax()) + 1 if overtaken.any() else len(lightest)
        targets = open_[lightest[:count]]
        chosen[done : done + count] = targets
        loads[targets] = after[:count]
        room[targets] -= lengths[done : done + count]
        done += count
    bins = np.empty_like(chosen)
    bins[order] = chosen
    return bins


def _best_fit(lengths: list[int], order: list[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sequence goes where the least room is left over, or opens another bin. A bin that takes one
    keeps the least room, so those of equal length fill one bin after another."""
    members: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens left and bin, ascending
    for length, equal in groupby(order, lengths.__getitem__):
        waiting, done = list(equal), 0
        while done < len(waiting):
            position = bisect_left(room, (length, -1))
            if position == len(room):
                left, index = max_tokens, len(members)
                members.append([])
            else:
                left, index = room.pop(position)
            taken = waiting[done : done + max(1, left // max(1, length))]
            members[index] += taken
            insort(room, (left - len(taken) * length, index))
            done += len(taken)
    return members


def _spread(members: list[list[int]], costs: Costs, num_bins: int) -> Int64Array:
    """The bin of each sequence, after the heaviest bins were halved until there are `num_bins` or one sequence in each."""
    heap = [(-float(costs[sequences].sum()), index) for index, sequences in enumerate(members) if len(sequences) > 1]
    heapq.heapify(heap)
    while heap and len(members) < num_bins:
        _, index = heapq.heappop(heap)
        halves = members[index][::2], members[index][1::2]
        members[index] = halves[0]
        members.append(halves[1])
        for bin_index, half in zip((index, len(members) - 1), halves, strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-float(costs[half].sum()), bin_index))
    bins = np.empty(len(costs), np.int64)
    for index, sequences in enumerate(members):
        bins[sequences] = index
    return bins


def _deal(bins: Int64Array, costs: Costs, num_bins: int, num_ranks: int) -> tuple[Int64Array, float]:
    """int64 [microbatches, ranks], and the share of the ranks' work that they wait for each other.

    Neighbours in cost run together; the rank with the least work so far takes the heaviest.
    """
    loads = np.bincount(bins, costs, num_bins).astype(np.float64)
    rows = np.argsort(-loads, kind="stable").reshape(-1, num_ranks)
    dealt = np.empty_like(rows)
    totals = np.zeros(num_ranks)
    for row, target in zip(rows, dealt, strict=True):
        least = np.argsort(totals, kind="stable")
        target[least] = row
        totals[least] += loads[row]
    return dealt, float(loads[rows[:, 0]].sum() / totals.mean() - 1.0)
