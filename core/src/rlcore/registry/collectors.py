"""Find the installed collector of a run's samples by its entry point."""

from collections.abc import Iterator
from typing import ClassVar

from attrs import frozen

from rlcore.published_plugins import how_to_install
from rlcore.registry.called import CalledEntry
from rlcore.registry.ranked import highest
from rlcore.spi.collector import RUN_KINDS, CollectorProvider, RunKind


@frozen(kw_only=True, eq=False)
class CollectorEntry(CalledEntry):
    """One installed collector."""

    described_by: ClassVar[type] = CollectorProvider
    is_of_recipes: ClassVar[bool] = False
    role: str = "collector"
    provider: CollectorProvider | None = None

    def problems(self) -> Iterator[str]:
        """Yield the faults of the description."""
        yield from super().problems()
        assert self.provider is not None
        runs = self.provider.runs
        if isinstance(runs, str) or not runs or not runs <= {*RUN_KINDS}:
            yield f"runs are {runs!r}; expected some of {', '.join(RUN_KINDS)}"

    def paths(self) -> dict[str, str]:
        """Return the paths of the collector and of its check."""
        found = {} if self.provider is None else {"collector": self.provider.collector, "check": self.provider.check}
        return {name: path for name, path in found.items() if path is not None}


def collector(kind: RunKind) -> CollectorEntry:
    """Return the collector of runs of a kind. PluginError where there is none, with the line that installs one."""
    return highest(
        CollectorEntry,
        "collector",
        f"collects the samples of a run of {kind}",
        how_to_install("collector", kind, ()),
        lambda entry: entry.provider is not None and kind in entry.provider.runs,
    )
