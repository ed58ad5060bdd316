"""The progress of processes beside the pools: the display shows the pools, and warnings pass."""

from collections.abc import Callable, Sequence

from attrs import frozen


@frozen(eq=False)
class QuietProgress:
    """An ExecutionProgress that passes warnings on."""

    note: Callable[[str], None]
    """Takes a warning of one line."""

    def phase(self, name: str) -> None:
        """See ExecutionProgress: the driver shows what it does."""

    def pool(self, name: str, doing: str) -> None:
        """See ExecutionProgress: likewise."""

    def span(self, role: str, name: str, start: float, seconds: Sequence[float]) -> None:
        """See ExecutionProgress: clocks of machines differ."""
