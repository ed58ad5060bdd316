"""The sections that choose plugins.

Each role's section names a plugin and holds one sub-table per plugin, `[trainer.NAME]`, whose class the plugin brings; so do
`[sinks]` and `[observers]`, which may name several.
"""

from collections.abc import Mapping
from typing import Annotated

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Text

EACH_ONCE = Constraint("that are not empty, each once", lambda value: all(value) and len(set(value)) == len(value))


@frozen(kw_only=True)
class PluginChoice:
    """`[trainer]`, `[generator]`: which plugin fills a role."""

    name: str = "auto"
    """A plugin's name, which must then be usable, or "auto" for the usable one of the highest priority."""
    options: Mapping[str, object] = field(factory=dict)
    """One section per plugin, such as [trainer.NAME], checked by the class that the plugin brings."""


@frozen(kw_only=True)
class NamedPluginChoice:
    """`[algorithm]`, `[environment]`: a plugin that has to be named, since each does something else."""

    name: str
    """The plugin's name."""
    options: Mapping[str, object] = field(factory=dict)
    """One section per plugin, such as [algorithm.NAME], checked by the class that the plugin brings."""


@frozen(kw_only=True)
class SinksConfig:
    """`[sinks]`: where metrics go besides metrics.jsonl."""

    names: Annotated[tuple[str, ...], EACH_ONCE] | None = None
    """Installed sinks to use; [] for none. By default those with a priority above 0."""
    options: Mapping[str, object] = field(factory=dict)
    """One section per sink, [sinks.NAME], checked by the class that the sink brings."""


@frozen(kw_only=True)
class ObserversConfig:
    """`[observers]`: what watches the run."""

    names: tuple[str, ...] = ()
    """Installed observers to use, besides those that are global."""
    options: Mapping[str, object] = field(factory=dict)
    """One section per observer, [observers.NAME], checked by the class that the observer brings."""


@frozen(kw_only=True)
class PluginsConfig:
    """`[plugins]`"""

    disable: tuple[Text, ...] = ()
    """Plugins to leave out, as "name" or "role:name" or a distribution's name; RLCORE_DISABLE_PLUGINS adds to it."""
