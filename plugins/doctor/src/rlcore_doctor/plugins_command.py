"""`rlcore plugins`: what is installed, what is usable or why not, and which one "auto" would take."""

import json
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import click
from attrs import evolve, frozen

from rlcore.gpu import Device, detect_device
from rlcore.installed import CORE
from rlcore.registry.discovery import ObserverEntry, Registry, discover, load_group, named_entries
from rlcore.registry.entries import ChannelEntry, DataSourceEntry, DescribedEntry, InstalledPlugin
from rlcore.registry.run_parts import CollectorEntry, CommandEntry, LoopObserverEntry, TextEntry, commands
from rlcore.registry.selection import AUTO_ROLES, install_line, missing_roles, missing_text
from rlcore.registry.states import MAX_REASON_CHARACTERS, PluginState, states_of
from rlcore.schema.printable import printable
from rlcore.spi.provider import FUNCTION_KINDS, ROLES, Provider
from rlcore.spi.version import SPI_VERSION
from rlcore_doctor.auto_choice import Row, auto_error, explain

_WIDTH_WITHOUT_TERMINAL = 240
_UNNAMED: Mapping[str, type[DescribedEntry]] = {
    "collector": CollectorEntry,
    "tokenizer": TextEntry,
    "renderer": TextEntry,
    "loop_observer": LoopObserverEntry,
}
"""Kinds that no recipe names: a run takes those of the highest priority, and every loop observer."""
_NOT_IMPORTED = ("architecture", *FUNCTION_KINDS)
"""Kinds without a description. Importing one would import its code, so that whether it is usable shows where a run uses it."""
Commands: TypeAlias = Sequence[PluginState[CommandEntry]]


def added_commands() -> Commands:
    """Return the commands that packages add to the core's own, which `rlcore --help` lists as well."""
    return [state for state in commands() if state.entry.distribution != CORE]


def plugins_json(registry: Registry, device: Device, added: Commands = ()) -> dict[str, Any]:
    """The listing as plain data; `added` are the commands that packages add."""
    return {
        "spi": list(SPI_VERSION),
        "device": device,
        "plugins": [_row_json(row) for role in ROLES for row in explain(registry, role, device)],
        "auto": {role: _auto_json(registry, role, device) for role in AUTO_ROLES},
        "missing": {"roles": list(roles := missing_roles(registry)), "install": install_line(roles)},
        "channels": [{**_state_json(state), "cost": _cost(state.entry)} for state in _channel_states(registry)],
        "datasets": [_state_json(state) for state in states_of(registry.data_sources)],
        **{f"{kind}s": list(map(_state_json, states)) for kind, states in _unnamed().items()},
        "observers": [{**_state_json(s), "global": s.entry.is_global} for s in states_of(registry.observer_entries)],
        **{f"{kind}s": [_named_json(entry) for entry in named_entries(kind)] for kind in _NOT_IMPORTED},
        "commands": [_state_json(state) for state in added],
        "warnings": list(registry.warnings),
    }


def plugins_lines(
    registry: Registry, device: Device, width: int, added: Commands = (), *, verbose: bool = False
) -> Iterator[str]:
    """The listing for a terminal of any width: name, whether "auto" takes it, and whether it is usable or why not.

    `verbose` adds two lines to each plugin: where it comes from, and its capabilities.
    """
    # Not rich's tables, whose import takes as long as all the rest.
    found = list(_listed(registry, device, added))
    entries = [entry for _, of_kind in found for entry in of_kind]
    names = min(max((len(entry.name) for entry in entries), default=1), width // 3)
    marks = max([1, *(len(entry.mark) for entry in entries)])
    widths = names, marks, max(1, width - names - marks - 6)
    for heading, of_kind in found:
        yield click.style(heading, bold=True)
        for entry in of_kind:
            for line in _in_columns((entry.name, entry.mark, entry.status), widths):
                yield click.style(line, **entry.style)
            for detail in entry.details if verbose else ():
                yield from (click.style(line, dim=True) for line in _in_columns(("", "", detail), widths))


def _in_columns(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The lines of one row, whose cells are wrapped."""
    wrapped = (textwrap.wrap(printable(cell, MAX_REASON_CHARACTERS), width) for cell, width in zip(cells, widths, strict=True))
    for parts in zip_longest(*wrapped, fillvalue=""):
        yield "".join(f"  {part:<{width}}" for part, width in zip(parts, widths, strict=True)).rstrip()


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print the listing as JSON.")
@click.option("--verbose", is_flag=True, help="Also show packages, versions, priorities and capabilities.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda", "gpu"]), default="auto", show_default=True, help="Device to run on."
)
def plugins_command(as_json: bool, verbose: bool, device: Literal["auto", "cpu", "cuda", "gpu"]) -> None:
    """List the installed plugins, and which ones "auto" takes.

    A broken plugin is listed with its error and does not change the exit code.
    """
    registry, added = discover(), added_commands()
    kind = detect_device() if device == "auto" else "cuda" if device == "gpu" else device
    if as_json:
        click.echo(json.dumps(plugins_json(registry, kind, added), indent=2))
        return
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 1)).columns
    heading = f"Plugins for rlcore's SPI {_version(SPI_VERSION)}, device {kind}"
    lines = [*textwrap.wrap(heading, width), *plugins_lines(registry, kind, width, added, verbose=verbose)]
    lines += [line for note in _footnotes(registry, kind) for line in textwrap.wrap(printable(note), width)]
    click.echo("\n".join(lines), color=False if os.environ.get("NO_COLOR") else None)


def _footnotes(registry: Registry, device: Device) -> list[str]:
    errors = [error for role in AUTO_ROLES if registry.of(role) and (error := auto_error(registry, role, device))]
    missing = missing_text(registry)
    return [*errors, *([missing] if missing else []), *(f"warning: {warning}" for warning in registry.warnings)]


@frozen
class _Listed:
    """One plugin as a line of the listing."""

    name: str
    mark: str
    """A mark after the name of a plugin that runs use without naming it."""
    status: str
    style: Mapping[str, Any]
    """Arguments of click.style."""
    details: tuple[str, ...]


def _listed(registry: Registry, device: Device, added: Commands) -> Iterator[tuple[str, list[_Listed]]]:
    """Every kind of plugin of which some are installed, with them."""
    kinds: dict[str, Iterable[_Listed]] = {
        **{role: map(_listed_row, explain(registry, role, device)) for role in ROLES},
        "channel": (_listed_state(state, details=[_channel_form(state.entry)]) for state in _channel_states(registry)),
        "dataset": (_listed_state(state, details=[_source_form(state.entry)]) for state in states_of(registry.data_sources)),
        "observer": map(_listed_observer, states_of(registry.observer_entries)),
        **{
            kind.replace("_", " "): (_listed_state(state, details=_priority(state.entry)) for state in states)
            for kind, states in _unnamed().items()
        },
        **{kind.replace("_", " "): map(_listed_name, named_entries(kind)) for kind in _NOT_IMPORTED},
        "command": (_listed_state(state, details=[f"priority {state.entry.priority}"]) for state in added),
    }
    yield from ((kind, found) for kind, of_kind in kinds.items() if (found := list(of_kind)))


def _listed_state(state: PluginState[Any], mark: str = "", usable: str = "usable", details: Sequence[str] = ()) -> _Listed:
    """One plugin, with what is said of it where it is usable, and the parts of its first detail."""
    entry: InstalledPlugin = state.entry
    detail = ", ".join(filter(None, (entry.origin, *details)))
    if state.is_usable:
        return _Listed(entry.name, mark, usable, {}, (detail,))
    status = ": ".join(filter(None, (f"{state.kind} ({entry.origin})", state.reason)))
    return _Listed(entry.name, mark, status, {"dim": True} if entry.disabled else {"fg": "red"}, (detail,))


def _listed_name(entry: InstalledPlugin) -> _Listed:
    status, style = (f"disabled ({entry.origin})", {"dim": True}) if entry.disabled else (f"installed by {entry.origin}", {})
    return _Listed(entry.name, "", status, style, ())


def _listed_row(row: Row) -> _Listed:
    provider = row.entry.provider
    details = [] if provider is None else [f"SPI {_version(_spi_json(provider))}"]
    if provider is not None and row.entry.error is None:  # else its fields may hold anything
        details.append(f"priority {provider.priority}")
    listed = _listed_state(row, "auto" if row.auto else "", "; ".join(filter(None, ("usable", row.reason))), details)
    if provider is None or row.entry.error is not None or not provider.capabilities:
        return listed
    return evolve(listed, details=(*listed.details, ", ".join(sorted(map(str, provider.capabilities)))))


def _listed_observer(state: PluginState[ObserverEntry]) -> _Listed:
    is_global = state.entry.is_global
    usable = "in use in every run" if is_global else "usable, by its name in observers.names"
    return _listed_state(state, "global" if is_global and not state.entry.disabled else "", usable)


def _unnamed() -> dict[str, tuple[PluginState[DescribedEntry], ...]]:
    return {kind: states_of(load_group(described, kind)) for kind, described in _UNNAMED.items()}


def _priority(entry: DescribedEntry) -> list[str]:
    has_one = entry.error is None and hasattr(entry.provider, "priority")
    return [f"priority {entry.provider.priority}"] if has_one else []


def _channel_states(registry: Registry) -> list[PluginState[ChannelEntry]]:
    """Return the state of each channel, the cheapest first."""
    return sorted(states_of(registry.channels), key=lambda state: _cost(state.entry) or 0)


def _cost(entry: ChannelEntry) -> int | None:
    return None if entry.provider is None or entry.error is not None else entry.provider.cost


def _channel_form(entry: ChannelEntry) -> str:
    channel = entry.provider
    if channel is None or entry.error is not None:
        return ""
    return f"cost {channel.cost}, reach {channel.reach}, devices {', '.join(sorted(channel.devices))}"


def _source_form(entry: DataSourceEntry) -> str:
    source = entry.provider
    if source is None or entry.error is not None:
        return ""
    return f"priority {source.priority}, {', '.join(sorted(source.suffixes)) or source.path}"


def _row_json(row: Row) -> dict[str, Any]:
    entry = row.entry
    provider = entry.provider if entry.error is None else None  # else its fields may hold anything
    return {
        "role": entry.role,
        **_named_json(entry),
        "spi": _spi_json(entry.provider),
        "priority": provider.priority if provider else None,
        "capabilities": sorted(map(str, provider.capabilities)) if provider else None,
        "devices": sorted(map(str, provider.devices)) if provider else None,
        "state": row.kind,
        "usable": row.is_usable,
        "reason": row.reason,
        "auto": row.auto,
    }


def _auto_json(registry: Registry, role: Any, device: Device) -> dict[str, str | None]:
    taken = next((row.entry.name for row in explain(registry, role, device) if row.auto), None)
    return {"name": taken, "error": auto_error(registry, role, device)}


def _state_json(state: PluginState[Any]) -> dict[str, Any]:
    spi = _spi_json(getattr(state.entry, "provider", None))
    return {**_named_json(state.entry), "spi": spi, "state": state.kind, "error": state.reason}


def _named_json(entry: InstalledPlugin) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("name", "distribution", "version", "disabled")}


def _spi_json(provider: Provider | None) -> list[int] | None:
    """Return the version of the SPI that a provider is written for; None where it names none."""
    spi: object = None if provider is None else provider.spi
    return list(spi) if isinstance(spi, tuple) and all(type(part) is int for part in spi) else None


def _version(spi: Sequence[int] | None) -> str:
    return "unknown" if spi is None else ".".join(map(str, spi))
