"""Installed plugins that no recipe names: commands, collectors, observers of the loop, tokenizers, renderers and functions."""

from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal, TypeVar

import click
from attrs import evolve, frozen

from rlcore.installed import DISABLE_VARIABLE
from rlcore.published_plugins import how_to_install, published, remedy_for
from rlcore.registry.discovery import load_group, load_object
from rlcore.registry.entries import DescribedEntry, InstalledPlugin
from rlcore.registry.plugin_errors import SLOW, attributed, in_time, listing_error
from rlcore.registry.states import PluginState, named_state, states_of
from rlcore.schema.problem import Note, Problem
from rlcore.spi.collector import RUN_KINDS, CollectorProvider, RunKind
from rlcore.spi.command import COMMAND_GROUP, CommandSpec
from rlcore.spi.errors import PluginError
from rlcore.spi.observer import LoopObserverProvider
from rlcore.spi.provider import group_of
from rlcore.spi.text import TextProvider

EntryT = TypeVar("EntryT", bound=DescribedEntry)


def highest(
    described: type[EntryT], kind: str, purpose: str, remedy: str, suits: Callable[[EntryT], bool] = lambda _: True
) -> EntryT:
    """Return the usable plugin of a kind with the highest priority, of those that suit. PluginError where there is none, with
    the reason of each that is installed and the `remedy`, or where several have that priority; `purpose` follows "which"."""
    states = states_of(load_group(described, kind))
    usable = [state.entry for state in states if state.is_usable and suits(state.entry)]
    if not usable:
        listed = "".join(f"\n  - {state.entry.label} is {state.text}" for state in states if not state.is_usable)
        is_twice = any(state.kind == "a duplicate name" for state in states)
        if any(state.kind == "disabled" for state in states):
            remedy = f"{remedy}{'. Or take' if remedy else 'Take'} one out of {DISABLE_VARIABLE}"
        expected = f"expected one in {group_of(kind)}. {'' if is_twice else remedy}".rstrip()
        raise PluginError(f"found no usable {kind}, which {purpose}; {expected}{listed}")
    most = max(entry.provider.priority for entry in usable)
    chosen, *tied = [entry for entry in usable if entry.provider.priority == most]
    if tied:
        labels = (entry.label for entry in (chosen, *tied))
        raise listing_error(f"several have priority {most}; {DISABLE_VARIABLE} disables the others", labels)
    return chosen


@frozen(kw_only=True, eq=False)
class CalledEntry(DescribedEntry):
    """One installed description of functions."""

    is_of_recipes: ClassVar[bool] = False

    def call(self, name: str, argument: object) -> Any:
        """Import the function of one of `paths` and call it; None without such a path. PluginError where it is not there."""
        path = self.paths().get(name)
        if path is None:
            return None
        function, problem = load_object(EntryPoint(self.name, path, group_of(self.role)), self.label, SLOW)
        if problem is not None:
            raise PluginError(f"{self.label} cannot be used: {problem}")
        what = "raised by" if name == self.role else f"raised by the {name} of"
        with attributed(what, self.label), in_time(f"the {name} of {self.label}", SLOW):
            return function(argument)

    def check(self, argument: object) -> tuple[Problem | Note, ...]:
        """Return what the plugin's own check finds wrong with a run. PluginError for anything but problems and notes."""
        found = self.call("check", argument)
        with attributed("raised by the check of", self.label):
            listed = () if found is None else tuple(found) if isinstance(found, Iterable) else (found,)
        if not all(isinstance(one, Problem | Note) for one in listed):
            raise PluginError(f"{self.label}: its check returned {found!r:.200}; expected problems and notes of rlcore.spi")
        return listed


@frozen(kw_only=True, eq=False)
class CollectorEntry(CalledEntry):
    """One installed collector."""

    described_by: ClassVar[type] = CollectorProvider
    path_fields: ClassVar[tuple[str, ...]] = ("collector", "check")
    role: str = "collector"
    provider: CollectorProvider | None = None

    def problems(self) -> Iterator[str]:
        """Yield the faults of the description."""
        yield from super().problems()
        assert self.provider is not None
        runs = self.provider.runs
        if isinstance(runs, str) or not runs or not runs <= {*RUN_KINDS}:
            yield f"runs are {runs!r}; expected some of {', '.join(RUN_KINDS)}"


def collector(kind: RunKind) -> CollectorEntry:
    """Return the collector of runs of a kind. PluginError where there is none, with the line that installs one."""
    return highest(
        CollectorEntry,
        "collector",
        f"collects the samples of a run of {kind}",
        how_to_install("collector", kind, ()),
        lambda entry: entry.provider is not None and kind in entry.provider.runs,
    )


@frozen(kw_only=True, eq=False)
class LoopObserverEntry(CalledEntry):
    """One installed observer of the loop."""

    described_by: ClassVar[type] = LoopObserverProvider
    path_fields: ClassVar[tuple[str, ...]] = ("observer", "check")
    role: str = "loop_observer"
    provider: LoopObserverProvider | None = None


def is_disabled(name: str) -> bool:
    """Return whether the environment variable disables the installed observer of a name."""
    return any(state.kind == "disabled" for state in states_of(load_group(LoopObserverEntry, "loop_observer", name=name)))


def loop_observers(unwanted: Collection[str]) -> tuple[LoopObserverEntry, ...]:
    """Return the installed observers but for those of `unwanted` names. PluginError where one of them is not usable."""
    states = [state for state in states_of(load_group(LoopObserverEntry, "loop_observer")) if state.kind != "disabled"]
    wanted = [state for state in states if state.entry.name not in unwanted]
    if broken := [f"{state.entry.label} is {state.text}" for state in wanted if not state.is_usable]:
        raise listing_error("found loop observers that are not usable; RLCORE_DISABLE_PLUGINS disables them", broken)
    return tuple(state.entry for state in wanted)


@frozen(kw_only=True, eq=False)
class TextEntry(DescribedEntry):
    """An installed loader of tokenizers, or renderer of chats and rows."""

    described_by: ClassVar[type] = TextProvider
    path_fields: ClassVar[tuple[str, ...]] = ("backend",)
    is_of_recipes: ClassVar[bool] = False


def text_backend(role: Literal["tokenizer", "renderer"]) -> Any:
    """Build the backend of a role: of its usable plugins, that of the highest priority. PluginError where there is none, with
    the reason of each that is installed and the line that installs one."""
    chosen = highest(TextEntry, role, "reads the text of a run", remedy_for(role))
    assert chosen.provider is not None
    backend, problem = load_object(EntryPoint(chosen.name, chosen.provider.backend, group_of(role)), chosen.label, SLOW)
    if problem is not None:
        raise PluginError(f"{chosen.label} cannot be used: {problem}")
    with attributed("raised as it was built:", chosen.label), in_time(f"the building of {chosen.label}", SLOW):
        return backend()


@frozen(kw_only=True, eq=False)
class FunctionEntry(InstalledPlugin):
    """One installed function."""

    is_of_recipes: ClassVar[bool] = False
    function: Callable[..., Any] | None = None
    """None where it is disabled or could not be imported."""

    def holding(self, loaded: object) -> "FunctionEntry":
        """Return this entry with the object that it names, and with the object's error."""
        if not callable(loaded):
            return evolve(self, error=f"the entry point names a {type(loaded).__name__}; expected a function")
        return evolve(self, function=loaded)


def functions(kind: str, **selected: Any) -> tuple[PluginState[FunctionEntry], ...]:
    """Return the state of each installed function of a kind, of those alone that `selected` names, such as by `name`."""
    return states_of(load_group(FunctionEntry, kind, **selected))


def only_function(kind: str) -> FunctionEntry | None:
    """Return the function of a kind; None where none is installed. PluginError where it is not usable, or not alone."""
    states = [state for state in functions(kind) if state.kind != "disabled"]
    if len(states) == 1 and states[0].is_usable:
        return states[0].entry
    if states:
        found = (
            f"found {len(states)} of {group_of(kind)}; expected one that is usable; RLCORE_DISABLE_PLUGINS disables the others"
        )
        raise listing_error(found, (f"{state.entry.label} is {state.text}" for state in states))
    return None


def call_function(kind: str, *arguments: object, **named: object) -> Any:
    """Call the only function of a kind. PluginError where there is none, or it is not usable."""
    entry = only_function(kind)
    if entry is None or entry.function is None:
        raise PluginError(f"found no {kind.replace('_', ' ')}; expected one in {group_of(kind)}. {remedy_for(kind)}")
    return entry.function(*arguments, **named)


def api_function(name: str) -> Callable[..., Any]:
    """Return `rlcore.NAME` of an installed package. PluginError where none brings it, or it is not usable."""
    state = named_state(functions("api", name=name), name)
    if state is None or not state.is_usable or state.entry.function is None:
        found = f"rlcore.{name} is {'not installed' if state is None else state.text}"
        raise PluginError(f"{found}. {how_to_install('api', name, ())}")
    return state.entry.function


@frozen(kw_only=True, eq=False)
class CommandEntry(DescribedEntry):
    """One installed command."""

    described_by: ClassVar[type] = CommandSpec
    path_fields: ClassVar[tuple[str, ...]] = ("command",)
    is_of_recipes: ClassVar[bool] = False
    role: str = "command"
    provider: CommandSpec | None = None

    def problems(self) -> Iterator[str]:
        """Yield the faults of the description."""
        yield from super().problems()
        spec = self.provider
        assert spec is not None
        if not isinstance(spec.help, str) or not spec.help.strip() or "\n" in spec.help:
            yield f"help is {spec.help!r}; expected one line"

    @property
    def priority(self) -> int:
        """The priority that it asks for; 0 where its description cannot be trusted."""
        return self.provider.priority if self.provider is not None and self.error is None else 0

    def load(self) -> click.Command:
        """Import the command. PluginError where that fails."""
        assert self.provider is not None
        loaded, problem = load_object(EntryPoint(self.name, self.provider.command, COMMAND_GROUP), self.label)
        if problem is None and not isinstance(loaded, click.Command):
            problem = f"{self.provider.command!r} is a {type(loaded).__name__}; expected a click.Command"
        if problem is not None:
            raise PluginError(f"{self.label} cannot be used: {problem}")
        return loaded  # type: ignore[no-any-return]


def commands() -> tuple[PluginState[CommandEntry], ...]:
    """Return the state of each installed command, by priority from the highest, then by name."""
    entries = sorted(load_group(CommandEntry, "command"), key=lambda entry: (-entry.priority, entry.name))
    return states_of(entries)


def find_command(name: str) -> CommandEntry | None:
    """Return the installed command of a name. No other description is imported.

    PluginError where it cannot be used, or where a released package that is not installed has it. None for an unknown name.
    """
    state = named_state(states_of(load_group(CommandEntry, "command", name=name)), name)
    if state is not None and state.is_usable:
        return state.entry
    if state is not None:
        raise PluginError(f"command {name!r} is {state.text}")
    if name in published().get("command", {}):
        raise PluginError(f"command {name!r} is not installed. {how_to_install('command', name, ())}")
    return None
