"""Comparisons of a rank that has others beside it."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import field, frozen


@frozen(kw_only=True, slots=False)
class Comparing:
    """Keeps what is wrong and goes on: a rank that left a case would leave the others waiting in their next collective."""

    wrong: list[str] = field(factory=list)
    """What did not compare so far."""

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """An assertion that fails in the block is kept."""
        try:
            yield
        except AssertionError:
            self.wrong.append(traceback.format_exc())
