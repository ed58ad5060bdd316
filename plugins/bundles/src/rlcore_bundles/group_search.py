"""The smallest set of changes that brings a difference: halving for a single one, else QuickXplain (Junker, AAAI 2004)."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

Brings: TypeAlias = Callable[[frozenset[str]], bool]

FEW = 2
"""Names of which halving is no quicker."""


class OutOfReplaysError(Exception):
    """No replay is left for a search."""


def smallest_set(names: Sequence[str], brings: Brings) -> list[str]:
    """A set of names of which none can be left out: `brings` is true of it. It is true of all names and false of none of them,
    and is not asked for either; more names never undo it. Likely names come first. OutOfReplaysError is passed on."""
    known = {frozenset[str](): False, frozenset(names): True}

    def asked(subset: frozenset[str]) -> bool:
        if subset not in known:
            known[subset] = brings(subset)
        return known[subset]

    def search(background: frozenset[str], grown: bool, left: Sequence[str]) -> list[str]:
        if grown and asked(background):
            return []
        if len(left) == 1:
            return list(left)
        half = (len(left) + 1) // 2
        first, second = left[:half], left[half:]
        of_second = search(background | set(first), True, second)
        of_first = search(background | set(of_second), bool(of_second), first)
        return [*of_first, *of_second]

    left = list(names)
    while len(left) > FEW:
        half = (len(left) + 1) // 2
        left = left[:half] if asked(frozenset(left[:half])) else left[half:]
    if not left or not asked(frozenset(left)):
        left = list(names)  # several in both halves of some set
    return search(frozenset(), False, left) if left else []
