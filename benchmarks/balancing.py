"""How evenly a batch is divided among data-parallel ranks: by rlcore, and by two simple rules.

    .venv/bin/python benchmarks/balancing.py

Lengths are log-normal with a mean of 795 tokens, cut at 4,096. Imbalance is the heaviest rank's work above the mean. Ranks wait
for each other in every layer of every microbatch, so what counts is the waiting: the sum over a step's microbatches of the
heaviest one that runs at the time, above the mean rank's work. Work is that of a model of hidden size 4,096.

The rules: "in order" gives sequence i to rank i mod R; "sorted, back and forth" deals them out by falling length, in turning
direction. Both then fill microbatches one after another. A rank with fewer of them than another waits.
"""

import argparse
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from response_lengths import draw_lengths

from rlcore.run.train_step.minibatches import plan_ranks, sequence_costs
from rlcore.spi.arrays import Int64Array

Plan: TypeAlias = list[list[Int64Array]]
"""By rank, its microbatches."""


def in_order(lengths: Int64Array, num_ranks: int, max_tokens: int) -> Plan:
    return [_one_after_another(lengths, np.arange(rank, len(lengths), num_ranks), max_tokens) for rank in range(num_ranks)]


def back_and_forth(lengths: Int64Array, num_ranks: int, max_tokens: int) -> Plan:
    order = np.argsort(-lengths, kind="stable")
    place = np.arange(len(lengths)) % (2 * num_ranks)
    rank_of = np.minimum(place, 2 * num_ranks - 1 - place)
    return [_one_after_another(lengths, order[rank_of == rank], max_tokens) for rank in range(num_ranks)]


def balanced(lengths: Int64Array, num_ranks: int, max_tokens: int) -> Plan:
    return plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens)


METHODS: dict[str, Callable[[Int64Array, int, int], Plan]] = {
    "in order": in_order,
    "sorted, back and forth": back_and_forth,
    "rlcore": balanced,
}


def _one_after_another(lengths: Int64Array, sequences: Int64Array, max_tokens: int) -> list[Int64Array]:
    found: list[list[int]] = []
    room = 0
    for sequence in sequences.tolist():
        if not found or lengths[sequence] > room:
            found.append([])
            room = max_tokens
        found[-1].append(sequence)
        room -= int(lengths[sequence])
    return [np.asarray(members, np.int64) for members in found]


def imbalance_and_waiting(plan: Plan, lengths: Int64Array) -> tuple[float, float]:
    """As the module's docstring says."""
    costs = sequence_costs(lengths)
    loads = np.zeros((len(plan), max(map(len, plan))))
    for rank, microbatches in enumerate(plan):
        loads[rank, : len(microbatches)] = [costs[members].sum() for members in microbatches]
    mean = loads.sum(1).mean()
    return float(loads.sum(1).max() / mean - 1), float(loads.max(0).sum() / mean - 1)


def measure(method: str, num_sequences: int, num_ranks: int, max_tokens: int, num_draws: int) -> tuple[float, ...]:
    """Worst imbalance, mean and worst waiting, most microbatches and least seconds over so many draws of lengths."""
    found = []
    for seed in range(num_draws):
        lengths = draw_lengths(num_sequences, mean=795, limit=4096, seed=seed)
        start = time.perf_counter()
        plan = METHODS[method](lengths, num_ranks, max_tokens)
        seconds = time.perf_counter() - start
        found.append((*imbalance_and_waiting(plan, lengths), max(map(len, plan)), seconds))
    imbalance, waiting, microbatches, seconds_ = zip(*found, strict=True)
    return max(imbalance), float(np.mean(waiting)), max(waiting), max(microbatches), min(seconds_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="of lengths, each with a seed of its own")
    parser.add_argument("--quick", action="store_true", help="the smallest case once, to try the script")
    arguments = parser.parse_args()
    heads = ("worst imbalance", "mean waiting", "worst waiting", "microbatches", "ms")
    print(f"{'sequences':>10}{'ranks':>7}{'max tokens':>12}  {'':20}" + "".join(f"{head:>17}" for head in heads))
    cases = [(512, 8, arguments.draws), (2048, 64, arguments.draws), (262_144, 1024, 1)]
    for num_sequences, num_ranks, num_draws in [(512, 8, 1)] if arguments.quick else cases:
        for max_tokens in (8192, 16_384):
            for method in METHODS:
                imbalance, mean, worst, microbatches, seconds = measure(method, num_sequences, num_ranks, max_tokens, num_draws)
                print(
                    f"{num_sequences:>10}{num_ranks:>7}{max_tokens:>12}  {method:20}"
                    f"{imbalance:>17.2%}{mean:>17.2%}{worst:>17.2%}{microbatches:>17.0f}{seconds * 1e3:>17.1f}"
                )


if __name__ == "__main__":
    main()
