"""Find the installed collector of a run's samples by its entry point."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

from attrs import frozen

from rlcore.published_plugins import how_to_install
from rlcore.registry.discovery import load_object
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.plugin_errors import attributed
from rlcore.registry.ranked import highest
from rlcore.spi.collector import COLLECTOR_GROUP, RUN_KINDS, CollectorProvider, RunKind
from rlcore.spi.errors import PluginError


@frozen(kw_only=True, eq=False)
class CollectorEntry(DescribedEntry):
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
        """Return the path of the collector."""
        return {} if self.provider is None else {"collector": self.provider.collector}

    def build(self, context: object) -> Any:
        """Import the collector and build it. PluginError where it is not there."""
        assert self.provider is not None
        made, problem = load_object(EntryPoint(self.name, self.provider.collector, COLLECTOR_GROUP), self.label)
        if problem is not None:
            raise PluginError(f"{self.label} cannot be used: {problem}")
        with attributed("raised as it was built:", self.label):
            return made(context)


def collector(kind: RunKind) -> CollectorEntry:
    """Return the collector of runs of a kind. PluginError where there is none, with the line that installs one."""
    return highest(
        CollectorEntry,
        "collector",
        f"collects the samples of a run of {kind}",
        how_to_install("collector", kind, ()),
        lambda entry: entry.provider is not None and kind in entry.provider.runs,
    )
