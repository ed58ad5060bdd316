"""Find the installed plugins: every entry point of every role, with its provider or with its error."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from traceback import walk_tb
from typing import Any, ClassVar

from attrs import evolve, field, frozen

from rlcore.installed import (
    core_entry_points,
    disabled_by_variable,
    distribution_of,
    incompatibility,
    installed_entry_points,
    matching,
    unreadable_metadata,
)
from rlcore.registry.entries import AnyEntry, ChannelEntry, DataSourceEntry, DescribedEntry, InstalledPlugin, quietly
from rlcore.registry.plugin_errors import fault_of, in_time, listing_error
from rlcore.registry.provider_checks import observer_config, observer_error, provider_problems
from rlcore.registry.states import named_state, states_of
from rlcore.schema.suggestions import did_you_mean
from rlcore.spi.provider import FUNCTION_KINDS, GROUPS, ROLES, Provider, Role, group_of
from rlcore.time_limit import FalseInterruptError, LateError


@frozen(kw_only=True)
class Entry(DescribedEntry):
    """One installed plugin of a role."""

    described_by: ClassVar[type] = Provider
    path_fields: ClassVar[tuple[str, ...]] = ("backend", "check", "plan", "tool_parser")
    role: Role
    provider: Provider | None = None
    taken_away: frozenset[str] = frozenset()
    """Capabilities that the provider lacks because of its section of the recipe."""

    def problems(self) -> Iterator[str]:
        """Yield the faults of the description."""
        assert self.provider is not None
        yield from super().problems()
        yield from provider_problems(self.provider, self.name, self.role)


@frozen(kw_only=True, eq=False)
class ObserverEntry(InstalledPlugin):
    """One installed observer."""

    role: str = "observer"
    observer: object | None = None
    """An object, or module, with wrapper-only hooks, or a class of them; None where it is disabled or could not be imported."""
    config: type | None = None
    """The class of its section of the recipe; None where it takes no options."""
    is_global: bool = False
    """True where every run uses it, named by the recipe or not."""

    def holding(self, loaded: object) -> "ObserverEntry":
        """Return this entry with the object that it names, and with the object's error."""
        error = observer_error(loaded, self.name)
        config = observer_config(loaded) if error is None else None
        return evolve(self, observer=loaded, config=config, error=error)


@frozen(kw_only=True)
class Registry:
    """All installed plugins."""

    entries: tuple[Entry, ...]
    """Ordered by role, name and distribution."""
    observer_entries: tuple[ObserverEntry, ...] = ()
    """The observers that recipes name, then the global ones, each ordered by name and distribution."""
    channels: tuple[ChannelEntry, ...] = ()
    """Ordered by name and distribution."""
    data_sources: tuple[DataSourceEntry, ...] = ()
    """Ordered by name and distribution."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user: of a name to disable that no plugin has, and of an unknown entry point group."""

    @classmethod
    def from_providers(cls, providers: Mapping[Role, Sequence[Provider]], observers: Sequence[object] = ()) -> "Registry":
        """Return a registry of these providers and observers, of the core's own plugins, and of the installed channels and data
        sources.

        Providers and observers are checked like installed ones. Observers are global.
        """
        entries = [
            Entry(role=role, name=provider.name, distribution="in-process", version="0").holding(provider)
            for role in ROLES
            for provider in providers.get(role, ())
        ]
        roles = {group_of(role): role for role in ROLES}
        entries += [load_entry(roles[point.group], point) for point in core_entry_points() if point.group in roles]
        named = [
            ObserverEntry(name=f"observer-{index}", distribution="in-process", version="0", is_global=True).holding(observer)
            for index, observer in enumerate(observers)
        ]
        return cls(
            entries=tuple(entries),
            observer_entries=tuple(named),
            channels=load_group(ChannelEntry, "channel"),
            data_sources=load_group(DataSourceEntry, "dataset"),
        )

    def of(self, role: Role) -> tuple[Entry, ...]:
        """Return every installed plugin of a role, broken and disabled ones too."""
        return tuple(entry for entry in self.entries if entry.role == role)

    def observers(self, names: Collection[str]) -> tuple[ObserverEntry, ...]:
        """Return the observers in use: those that the recipe names, and the global ones.

        PluginError lists every such name that no usable observer has, or that several have.
        """
        found = states_of(entry for entry in self.observer_entries if entry.name in names or entry.is_global)
        usable = {state.entry.name for state in found if state.is_usable}
        problems = []
        for name in dict.fromkeys([*names, *(state.entry.name for state in found)]):
            state = named_state(found, name)
            if state is None:
                hint = did_you_mean(name, (entry.name for entry in self.observer_entries))
                problems.append(f"observer {name!r} is not installed{hint}")
            elif name not in usable and (name in names or state.kind != "disabled"):
                problems.append(f"{state.entry.label if state.kind == 'not usable' else f'observer {name!r}'} is {state.text}")
        if problems:
            headline = f"{len(problems)} observer(s) cannot be used; repair or disable them, or do not name them"
            raise listing_error(headline, problems)
        return tuple(state.entry for state in found if state.is_usable)


@frozen
class _DisableList:
    specs: tuple[str, ...]
    matched: set[str] = field(factory=set)

    def covers(self, entry: InstalledPlugin) -> bool:
        """Return whether a plugin is disabled, and remember which specs named one."""
        hits = matching(self.specs, entry.role, entry.name, entry.distribution)
        self.matched.update(hits)
        return bool(hits)

    def unmatched(self, known: Iterable[str]) -> tuple[str, ...]:
        """Return a line for each spec that named no plugin."""
        known = tuple(known)
        return tuple(
            f"{spec!r} is to be disabled, but no such plugin is installed{did_you_mean(spec, known)}"
            for spec in self.specs
            if spec not in self.matched
        )


def discover(disable: Sequence[str] = ()) -> Registry:
    """Find every installed plugin. `disable` holds names, `role:name`s and names of distributions to leave out.

    No plugin's failure raises: one that cannot be imported is listed with its error, which selection judges.
    """
    disabled = _disable_list(disable)
    with in_time("the search for installed packages"):
        found = installed_entry_points()
    entries = [entry for role in ROLES for entry in load_group(Entry, role, disabled)]
    observers = [
        evolve(entry, is_global=kind == "global_observer")
        for kind in ("observer", "global_observer")
        for entry in load_group(ObserverEntry, kind, disabled)
    ]
    channels = load_group(ChannelEntry, "channel", disabled)
    sources = load_group(DataSourceEntry, "dataset", disabled)
    known = {name for entry in (*entries, *observers, *channels, *sources) for name in (entry.name, entry.distribution)}
    disabled.matched.update(_matched_before_recipes(found.entry_points, ()))
    too_late = [spec for spec in disable if spec in _matched_before_recipes(found.entry_points, disable) - disabled.matched]
    disabled.matched.update(too_late)
    warnings = (
        *found.warnings,
        *unreadable_metadata(found.entry_points),
        *disabled.unmatched(known),
        *(f"plugins.disable does not disable {spec!r}, which RLCORE_DISABLE_PLUGINS alone does" for spec in too_late),
        *_unknown_groups(found.entry_points),
    )
    return Registry(
        entries=tuple(entries),
        observer_entries=tuple(observers),
        channels=channels,
        data_sources=sources,
        warnings=warnings,
    )


def _matched_before_recipes(installed: EntryPoints, disable: Sequence[str]) -> set[str]:
    """Return what these, and the environment variable, name of plugins that no recipe can disable."""
    disabled = _disable_list(disable)
    for kind in (*FUNCTION_KINDS, "collector", "command", "loop_observer", "tokenizer", "renderer"):
        for entry_point in installed.select(group=group_of(kind)):
            disabled.covers(_named(InstalledPlugin, entry_point, kind))
    return disabled.matched


def load_group(entry: type[AnyEntry], kind: str, disabled: _DisableList | None = None, **selected: Any) -> tuple[AnyEntry, ...]:
    """Import what the entry points of a kind name, and check it. Without `disabled`, the environment variable alone disables
    some of them."""
    disabled = disabled or _disable_list(())
    return tuple(_loaded(_named(entry, point, kind), point, disabled) for point in _points(kind, **selected))


def named_entries(kind: str) -> tuple[InstalledPlugin, ...]:
    """Return the entry points of a kind, of which nothing is imported. No setting disables families of models."""
    disabled = _DisableList(()) if kind == "architecture" else _disable_list(())
    named = (_named(InstalledPlugin, point, kind) for point in _points(kind))
    return tuple(evolve(entry, disabled=disabled.covers(entry)) for entry in named)


def _points(kind: str, **selected: Any) -> Sequence[EntryPoint]:
    with in_time("the search for installed packages"):  # which a named pipe in place of a file would never end
        return _sorted(installed_entry_points().entry_points.select(group=group_of(kind), **selected))


def _named(entry: type[AnyEntry], entry_point: EntryPoint, kind: str) -> AnyEntry:
    """Return the entry of an entry point, of which nothing is imported."""
    distribution, version = distribution_of(entry_point)
    role = kind.removeprefix("global_")
    return entry(role=role, name=entry_point.name, distribution=distribution, version=version)


def _disable_list(disable: Sequence[str]) -> _DisableList:
    """Return the list of these plugins and of those in the environment variable."""
    return _DisableList(tuple(dict.fromkeys([*disable, *disabled_by_variable()])))


def load_entry(role: Role, entry_point: EntryPoint) -> Entry:
    """Import one plugin's provider and check it."""
    return _loaded(_named(Entry, entry_point, role), entry_point, _DisableList(()))


def _loaded(entry: AnyEntry, entry_point: EntryPoint, disabled: _DisableList) -> AnyEntry:
    """Return the entry with the object that it names, or with the error of its import; a disabled one as it is."""
    if disabled.covers(entry):
        return evolve(entry, disabled=True)
    loaded, problem = load_object(entry_point, entry.label)
    if problem is not None:
        return evolve(entry, error=problem)
    try:
        with quietly(f"the description of {entry.label}"):  # whose defaults are computed
            return entry.holding(loaded)
    except (LateError, FalseInterruptError) as error:
        return evolve(entry, error=str(error))
    except BaseException as error:  # whatever its objects raise where they are shown
        return evolve(entry, error=f"its description raised {fault_of(error)}")


def load_object(entry_point: EntryPoint, label: str, times: float = 1.0) -> tuple[Any, str | None]:
    """Import the object that an entry point names, in `times` the usual seconds. Return the object and None, or None and the
    reason of the failure."""
    if problem := incompatibility(entry_point.dist):
        return None, problem
    if EntryPoint.pattern.match(entry_point.value) is None:
        return None, f"the entry point names {entry_point.value!r}; expected package.module:attribute"
    try:
        with quietly(f"the import of {label}", times):
            return entry_point.load(), None
    # An import may raise anything, such as SystemExit, or the BaseException of a panic in Rust. It must not end the listing.
    except BaseException as error:
        return None, _import_failure(entry_point, error)


def _unknown_groups(installed: EntryPoints) -> Iterator[str]:
    """Yield a line for each entry point in a group that begins with "rlcore." and that rlcore does not know."""
    for group in sorted(installed.groups):
        if group.startswith("rlcore.") and group not in GROUPS:
            hint = did_you_mean(group, GROUPS) or f"; groups are {', '.join(GROUPS)}"
            for entry_point in _sorted(installed.select(group=group)):
                owner = " ".join(distribution_of(entry_point))
                yield f"{owner} has {entry_point.name!r} in the unknown entry point group {group!r}{hint}"


def _import_failure(entry_point: EntryPoint, error: BaseException) -> str:
    """Return the error of an import, with the innermost module and line that raised it."""
    if isinstance(error, LateError | FalseInterruptError):
        return f"import failed: {error}"
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in walk_tb(error.__traceback__)]
    places = [(name, line) for name, line in frames if name != __name__ and not name.startswith("importlib")]
    where = f"in {places[-1][0]}, line {places[-1][1]}" if places else f"of {entry_point.value}"
    return f"import failed {where}: {fault_of(error)}"


def _sorted(entry_points: Iterable[EntryPoint]) -> list[EntryPoint]:
    return sorted(entry_points, key=lambda entry_point: (entry_point.name, *distribution_of(entry_point)))
