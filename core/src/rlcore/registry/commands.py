"""Find the installed commands by their entry points, and import the one that runs."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import ClassVar

import click
from attrs import evolve, field, frozen

from rlcore.published_plugins import how_to_install, published
from rlcore.registry.discovery import Installed, load_group, load_object
from rlcore.registry.module_source import path_problem
from rlcore.registry.provider_checks import OBJECT_PATH, spi_mismatch
from rlcore.registry.states import PluginState, named_state, states_of
from rlcore.spi.command import COMMAND_GROUP, CommandSpec
from rlcore.spi.errors import PluginError


@frozen(kw_only=True, eq=False)
class CommandEntry(Installed):
    """One installed command."""

    is_of_recipes: ClassVar[bool] = False
    role: str = field(default="command", init=False)
    spec: CommandSpec | None = None
    """None where it is disabled or could not be imported; there may be one besides an error (a wrong SPI version, say)."""

    def holding(self, loaded: object) -> "CommandEntry":
        """Return this entry with the object that it names, and with the object's error."""
        if not isinstance(loaded, CommandSpec):
            found = f"the entry point names a {type(loaded).__name__}"
            return evolve(self, error=f"{found}; expected an instance of rlcore.spi.CommandSpec")
        error = spi_mismatch(loaded.spi) or "; ".join(_problems(loaded, self.name)) or None
        return evolve(self, spec=loaded, error=error)

    @property
    def is_of_another_interface(self) -> bool:
        """True where it is written for another version of the SPI."""
        return self.spec is not None and spi_mismatch(self.spec.spi) is not None

    @property
    def priority(self) -> int:
        """The priority that it asks for; 0 where its description cannot be trusted."""
        return self.spec.priority if self.spec is not None and self.error is None else 0

    def unavailable(self) -> str | None:
        """Return the fault of its command's path. The command itself is not imported."""
        if self.spec is None or (problem := path_problem(self.spec.command, quick=True)) is None:
            return self.error
        return f"it names {problem}"

    def load(self) -> click.Command:
        """Import the command. PluginError where that fails."""
        assert self.spec is not None
        loaded, problem = load_object(EntryPoint(self.name, self.spec.command, COMMAND_GROUP), self.label)
        if problem is None and not isinstance(loaded, click.Command):
            problem = f"{self.spec.command!r} is a {type(loaded).__name__}; expected a click.Command"
        if problem is not None:
            raise PluginError(f"{self.label} cannot be used: {problem}")
        return loaded  # type: ignore[no-any-return]


def _problems(spec: CommandSpec, name: str) -> Iterator[str]:
    if spec.name != name:
        yield f"the command calls itself {spec.name!r}, its entry point {name!r}; expected one name"
    if not isinstance(spec.help, str) or not spec.help.strip() or "\n" in spec.help:
        yield f"help is {spec.help!r}; expected one line"
    if not isinstance(spec.command, str) or not OBJECT_PATH.fullmatch(spec.command):
        yield f"command is {spec.command!r}; expected 'package.module:name'"
    if type(spec.priority) is not int:
        yield f"priority is {spec.priority!r}; expected an integer"


def commands() -> tuple[PluginState[CommandEntry], ...]:
    """Return the state of each installed command, by priority from the highest, then by name."""
    entries = sorted(load_group(CommandEntry, COMMAND_GROUP), key=lambda entry: (-entry.priority, entry.name))
    return states_of(entries)


def find_command(name: str) -> CommandEntry | None:
    """Return the installed command of a name. No other description is imported.

    PluginError where it cannot be used, or where a released package that is not installed has it. None for an unknown name.
    """
    state = named_state(states_of(load_group(CommandEntry, COMMAND_GROUP, name=name)), name)
    if state is not None and state.is_usable:
        return state.entry
    if state is not None:
        raise PluginError(f"command {name!r} is {state.text}")
    if name in published().get("command", {}):
        raise PluginError(f"command {name!r} is not installed. {how_to_install('command', name, ())}")
    return None
