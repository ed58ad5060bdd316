"""All-gathers a value over ranks, and sends it again only where a rank's value has changed."""

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
    """Gathers a value of each rank. Where all ranks tell what they told together before, digests alone travel.

    Nothing is taken for unchanged unseen: each rank compares its own value whole with its own of before, and the digest is of
    the values of all. A rank that is new knows no digest, and then all values are sent once more.
    """

    def __init__(self, gathered: Callable[[Any], list[Any]]) -> None:
        """`gathered`: what every rank has given, in their order; a collective of all."""
        self._gathered = gathered
        self._rounds: list[_Round[T]] = []
        """The last first."""

    def by_all(self, own: T) -> tuple[T, ...]:
        """Every rank's value, in their order; the same object as before where nothing has changed. A collective of all ranks.

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
