"""All-gather that sends only digests if no rank's value has changed."""

import hashlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from attrs import frozen

T = TypeVar("T")
MOST_KEPT = 4
"""Rounds that are remembered: refits of adapters alone and of whole models come in turn."""


@frozen
class _Round(Generic[T]):
    own: T
    everyones: tuple[T, ...]
    digest: bytes


class CachedAllGather(Generic[T]):
    """Gathers a value of each rank. If no rank's value has changed since an earlier round, ranks send only its digest.

    Each rank compares its whole value with its earlier one, and the digest covers the values of all ranks. A new rank knows no
    digest, so all values are sent again.
    """

    def __init__(self, gathered: Callable[[Any], list[Any]]) -> None:
        """`gathered` is a collective of all ranks. It returns every rank's argument, in the order of ranks."""
        self._gathered = gathered
        self._rounds: list[_Round[T]] = []
        """The last first."""

    def by_all(self, own: T) -> tuple[T, ...]:
        """Return every rank's value, in the order of ranks; the earlier object if nothing has changed. A collective.

        Values are immutable, and those that differ differ in their repr.
        """
        known = {each.digest: each for each in self._rounds if each.own == own}
        offers: list[tuple[bytes, ...]] = self._gathered(tuple(known))
        agreed = set(offers[0]).intersection(*offers)
        if agreed:  # of several rounds with these values of all ranks there is one digest
            found = known[agreed.pop()]
        else:
            told = self._gathered((own, hashlib.sha256(repr(own).encode()).digest()))
            of_all = hashlib.sha256(b"".join(digest for _, digest in told)).digest()
            found = _Round(own, tuple(value for value, _ in told), of_all)
        self._rounds = [found, *(each for each in self._rounds if each.digest != found.digest)][:MOST_KEPT]
        return found.everyones

    def forget(self) -> None:
        """Have all values sent anew."""
        self._rounds = []
