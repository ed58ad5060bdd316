"""Find the installed commands by their entry points, and import the one that runs."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import ClassVar

import click
from attrs import frozen

from rlcore.published_plugins import how_to_install, published
from rlcore.registry.discovery import load_group, load_object
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.states import PluginState, named_state, states_of
from rlcore.spi.command import COMMAND_GROUP, CommandSpec
from rlcore.spi.errors import PluginError


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
