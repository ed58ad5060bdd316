"""How generation that runs ahead divides itself among steps where trainer and generator take turns.

A run keeps the groups of `max_staleness + 1` steps open, and a step's turn ends once a step's groups have ended. Those that a
run begins with are all open in its first turn: it ends with the quickest of them, the next one with the next, and the last of
`max_staleness + 1` with the slowest. From then on each step waits for the groups that began `max_staleness` steps before it.
They have what these turns have brought them, so that the turns come again and again.
"""

import math
from collections.abc import Sequence
from itertools import pairwise


def generation_turns(lengths: Sequence[float], samples_per_prompt: int, num_steps: int) -> tuple[float, ...]:
    """The tokens that a sample under way gets in each of `num_steps` turns, which follow each other over and over; together
    they are the longest answer. `lengths` are quantiles of equal weight, from the shortest to the longest."""
    ends = [_group_length(lengths, samples_per_prompt, number / num_steps) for number in range(1, num_steps)]
    return tuple(end - begin for begin, end in pairwise((0.0, *ends, lengths[-1])))


def _group_length(lengths: Sequence[float], samples_per_prompt: int, share: float) -> float:
    """Tokens of the longest sample of a group than which this share of groups has none longer."""
    place = math.pow(share, 1 / samples_per_prompt) * len(lengths) - 0.5
    lower = min(max(0, int(place)), len(lengths) - 1)
    upper = min(lower + 1, len(lengths) - 1)
    return lengths[lower] + (lengths[upper] - lengths[lower]) * min(max(0.0, place - lower), 1.0)
