"""Which plugins are installed: every entry point of every role, each with its provider or with what is wrong with it."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from traceback import walk_tb

from attrs import evolve, field, frozen
from packaging.utils import canonicalize_name

from rlcore.installed import CORE_ENTRY_POINTS, distribution_of, installed_entry_points
from rlcore.registry.plugin_errors import is_outside
from rlcore.registry.provider_checks import observer_config, observer_error, provider_error
from rlcore.schema.suggestions import did_you_mean
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import (
    ARCHITECTURE_GROUP,
    ENTRY_POINT_GROUPS,
    GLOBAL_OBSERVER_GROUP,
    OBSERVER_GROUP,
    ROLES,
    Provider,
    Role,
)

DISABLE_VARIABLE = "RLCORE_DISABLE_PLUGINS"
"""Environment variable with further plugins to leave out, separated by commas."""
_OBSERVER = "observer"
_IN_PROCESS = "in-process"


@frozen(kw_only=True)
class Entry:
    """One installed plugin of a role."""

    role: Role
    name: str
    distribution: str
    version: str
    provider: Provider | None
    """None where it is disabled or could not be imported; there may be one besides an error (a wrong SPI version, say)."""
    error: str | None = None
    """What makes it unfit for use anywhere."""
    disabled: bool = False
    """Left out by the user; nothing of it has been imported."""

    @property
    def label(self) -> str:
        """The name that messages use for it."""
        return f"{self.role} {self.name!r} ({self.distribution} {self.version})"


@frozen(kw_only=True, eq=False)
class ObserverEntry:
    """One installed observer."""

    name: str
    distribution: str
    version: str
    observer: object | None
    """An object, or module, with wrapper-only hooks, or a class of them; None where it is disabled or could not be imported."""
    config: type | None = None
    """The class of its section of the recipe; None where it takes no options."""
    error: str | None = None
    """What makes it unfit for use."""
    disabled: bool = False
    is_global: bool = False
    """In use in every run, whether the recipe names it or not."""

    @property
    def label(self) -> str:
        """The name that messages use for it."""
        return f"{_OBSERVER} {self.name!r} ({self.distribution} {self.version})"


@frozen(kw_only=True)
class Registry:
    """Every plugin that is installed."""

    entries: tuple[Entry, ...]
    """Ordered by role, name and distribution."""
    observer_entries: tuple[ObserverEntry, ...] = ()
    """Those that recipes name, then the global ones, each ordered by name and distribution."""
    warnings: tuple[str, ...] = ()
    """What the user should know though it stops nothing: a name to disable that names no plugin, an unknown group."""

    @classmethod
    def from_providers(cls, providers: Mapping[Role, Sequence[Provider]], observers: Sequence[object] = ()) -> "Registry":
        """A registry of given providers and observers, checked like installed ones, and of the core's own plugins. Observers
        are global."""
        entries = [
            _checked_entry(role, provider.name, _IN_PROCESS, "0", provider)
            for role in ROLES
            for provider in providers.get(role, ())
        ]
        entries += [load_entry("sink", entry_point) for entry_point in CORE_ENTRY_POINTS]
        named = [
            _checked_observer(f"observer-{index}", _IN_PROCESS, "0", True, observer) for index, observer in enumerate(observers)
        ]
        return cls(entries=tuple(entries), observer_entries=tuple(named))

    def of(self, role: Role) -> tuple[Entry, ...]:
        """Every installed plugin of a role, the broken and the disabled ones too."""
        return tuple(entry for entry in self.entries if entry.role == role)

    def observers(self, names: Collection[str]) -> tuple[ObserverEntry, ...]:
        """The observers in use: those that the recipe names, and the global ones. PluginError lists every one of them that is
        not installed, disabled, unfit or not the only one of its name, since leaving it out would be silent."""
        used = [entry for entry in self.observer_entries if entry.name in names or (entry.is_global and not entry.disabled)]
        problems = [f"{entry.label}: {entry.error}" for entry in used if entry.error is not None]
        for name in dict.fromkeys([*names, *(entry.name for entry in used)]):
            found = [entry for entry in used if entry.name == name and not entry.disabled]
            if not any(entry.name == name for entry in used):
                hint = did_you_mean(name, (entry.name for entry in self.observer_entries))
                problems.append(f"observer {name!r} is not installed{hint}")
            elif not found:
                problems.append(f"observer {name!r} is disabled")
            elif len(found) > 1:
                owners = " and ".join(f"{entry.distribution} {entry.version}" for entry in found)
                problems.append(f"observer {name!r} is a duplicate name: {owners} provide it")
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise PluginError(
                f"{len(problems)} observer(s) cannot be used; repair or disable them, or do not name them:{lines}"
            )
        return tuple(entry for entry in used if not entry.disabled)


@frozen
class _DisableList:
    specs: tuple[str, ...]
    matched: set[str] = field(factory=set)

    def covers(self, role: str, name: str, distribution: str) -> bool:
        """Whether a plugin is to be left out; remembers which of the specs named one."""
        hits = {spec for spec in self.specs if spec in (name, f"{role}:{name}") or _same_distribution(spec, distribution)}
        self.matched.update(hits)
        return bool(hits)

    def unmatched(self, known: Iterable[str]) -> tuple[str, ...]:
        """A line for each spec that named no plugin."""
        known = tuple(known)
        return tuple(
            f"{spec!r} is to be disabled, but no such plugin is installed{did_you_mean(spec, known)}"
            for spec in self.specs
            if spec not in self.matched
        )


def discover(disable: Sequence[str] = ()) -> Registry:
    """Every installed plugin. `disable` holds names, `role:name`s and distributions' names to leave out.

    Nothing raises here: a plugin that cannot be imported is listed with its error, and selection decides what that means.
    """
    from_environment = (spec.strip() for spec in os.environ.get(DISABLE_VARIABLE, "").split(","))
    disabled = _DisableList(tuple(dict.fromkeys([*disable, *filter(None, from_environment)])))
    found = installed_entry_points()
    installed = found.entry_points
    entries = [
        _entry(role, entry_point, disabled)
        for role in ROLES
        for entry_point in _sorted(installed.select(group=ENTRY_POINT_GROUPS[role]))
    ]
    observers = [
        _observer_entry(entry_point, disabled)
        for group in (OBSERVER_GROUP, GLOBAL_OBSERVER_GROUP)
        for entry_point in _sorted(installed.select(group=group))
    ]
    known = {entry.name for entry in entries} | {entry.distribution for entry in entries}
    known |= {observer.name for observer in observers} | {observer.distribution for observer in observers}
    warnings = (*found.warnings, *disabled.unmatched(known), *_unknown_groups(installed))
    return Registry(entries=tuple(entries), observer_entries=tuple(observers), warnings=warnings)


def load_entry(role: Role, entry_point: EntryPoint) -> Entry:
    """Import one plugin's provider and check it."""
    distribution, version = distribution_of(entry_point)
    try:
        loaded = entry_point.load()
    # A module may do anything when it is imported, ending the interpreter included, and what panics in Rust is no Exception;
    # it must not take the listing along.
    except BaseException as error:
        if is_outside(error):
            raise
        failure = _import_failure(entry_point, error)
        return Entry(role=role, name=entry_point.name, distribution=distribution, version=version, provider=None, error=failure)
    return _checked_entry(role, entry_point.name, distribution, version, loaded)


def _checked_entry(role: Role, name: str, distribution: str, version: str, loaded: object) -> Entry:
    return Entry(
        role=role,
        name=name,
        distribution=distribution,
        version=version,
        provider=loaded if isinstance(loaded, Provider) else None,
        error=provider_error(loaded, name),
    )


def _entry(role: Role, entry_point: EntryPoint, disabled: _DisableList) -> Entry:
    distribution, version = distribution_of(entry_point)
    if disabled.covers(role, entry_point.name, distribution):
        return Entry(role=role, name=entry_point.name, distribution=distribution, version=version, provider=None, disabled=True)
    return load_entry(role, entry_point)


def _observer_entry(entry_point: EntryPoint, disabled: _DisableList) -> ObserverEntry:
    name, is_global = entry_point.name, entry_point.group == GLOBAL_OBSERVER_GROUP
    distribution, version = distribution_of(entry_point)
    unloaded = ObserverEntry(name=name, distribution=distribution, version=version, observer=None, is_global=is_global)
    if disabled.covers(_OBSERVER, name, distribution):
        return evolve(unloaded, disabled=True)
    try:
        observer = entry_point.load()
    except BaseException as failure:
        if is_outside(failure):
            raise
        return evolve(unloaded, error=_import_failure(entry_point, failure))
    return _checked_observer(name, distribution, version, is_global, observer)


def _checked_observer(name: str, distribution: str, version: str, is_global: bool, observer: object) -> ObserverEntry:
    error = observer_error(observer, name)
    return ObserverEntry(
        name=name,
        distribution=distribution,
        version=version,
        observer=observer,
        config=observer_config(observer) if error is None else None,
        error=error,
        is_global=is_global,
    )


def _unknown_groups(installed: EntryPoints) -> Iterator[str]:
    """A line for each group that only looks like one of ours, which would otherwise be passed over in silence."""
    ours = (*ENTRY_POINT_GROUPS.values(), OBSERVER_GROUP, GLOBAL_OBSERVER_GROUP, ARCHITECTURE_GROUP)
    for group in sorted(installed.groups):
        if group.startswith("rlcore.") and group not in ours:
            hint = did_you_mean(group, ours) or f"; groups are {', '.join(ours)}"
            for entry_point in _sorted(installed.select(group=group)):
                distribution, version = distribution_of(entry_point)
                yield f"{distribution} {version} has {entry_point.name!r} in the unknown entry point group {group!r}{hint}"


def _import_failure(entry_point: EntryPoint, error: BaseException) -> str:
    """What an import raised, and the innermost module of the import in which it did."""
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in walk_tb(error.__traceback__)]
    places = [(name, line) for name, line in frames if name != __name__ and not name.startswith("importlib")]
    where = f"in {places[-1][0]}, line {places[-1][1]}" if places else f"of {entry_point.value}"
    return f"import failed {where}: {type(error).__name__}: {error}"


def _sorted(entry_points: Iterable[EntryPoint]) -> list[EntryPoint]:
    return sorted(entry_points, key=lambda entry_point: (entry_point.name, *distribution_of(entry_point)))


def _same_distribution(spec: str, distribution: str) -> bool:
    return ":" not in spec and canonicalize_name(spec) == canonicalize_name(distribution)
