"""Whether the rewards of a group tell its samples apart."""

from collections.abc import Sequence

RELATIVE_RESOLUTION = 1e-6
"""Rewards that differ by no more than this share of their magnitude are equal: about eight float32 roundings."""


def differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than roundings, such as that of 0.1 + 0.2. False of a single one, and of none."""
    return bool(rewards) and max(rewards) - min(rewards) > RELATIVE_RESOLUTION * max(map(abs, rewards))
