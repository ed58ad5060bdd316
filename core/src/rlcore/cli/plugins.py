"""`rlcore plugins`: what is installed, what is usable or why not, and which one "auto" would take."""

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import click
from attrs import frozen

from rlcore.gpu import Device, detect_device
from rlcore.registry.discovery import ObserverEntry, Registry, discover
from rlcore.registry.selection import AUTO_ROLES, Row, auto_error, explain
from rlcore.spi.provider import ROLES
from rlcore.spi.version import SPI_VERSION

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH_WITHOUT_TERMINAL = 240


def plugins_json(registry: Registry, device: Device) -> dict[str, Any]:
    """The listing as plain data."""
    return {
        "spi": list(SPI_VERSION),
        "device": device,
        "plugins": [_row_json(row) for role in ROLES for row in explain(registry, role, device)],
        "auto": {role: _auto_json(registry, role, device) for role in AUTO_ROLES},
        "observers": [_observer_json(observer) for observer in registry.observer_entries],
        "warnings": list(registry.warnings),
    }


def plugins_grid(registry: Registry, device: Device, *, verbose: bool = False) -> "Table":
    """The listing for a terminal of any width: name, whether "auto" takes it, and whether it is usable or why not.

    `verbose` adds two lines to each plugin: where it comes from, and its capabilities.
    """
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column(overflow="fold")
    for heading, entries in _listed(registry, device):
        grid.add_row(Text(heading, style="bold"))
        for entry in entries:
            grid.add_row(Text(f"  {entry.name}", overflow="fold"), entry.mark, Text(entry.status), style=entry.style)
            for detail in entry.details if verbose else ():
                grid.add_row("", "", Text(detail), style="dim")
    return grid


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
    registry = discover()
    kind = detect_device() if device == "auto" else "cuda" if device == "gpu" else device
    if as_json:
        click.echo(json.dumps(plugins_json(registry, kind), indent=2))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    console.print(f"Plugins for rlcore's SPI {_version(SPI_VERSION)}, device {kind}", highlight=False)
    console.print(plugins_grid(registry, kind, verbose=verbose))
    for line in _footnotes(registry, kind):
        console.print(line, markup=False, highlight=False)


def _footnotes(registry: Registry, device: Device) -> list[str]:
    errors = [error for role in AUTO_ROLES if registry.of(role) and (error := auto_error(registry, role, device))]
    return [*errors, *(f"warning: {warning}" for warning in registry.warnings)]


@frozen
class _Listed:
    """How one plugin is shown."""

    name: str
    mark: str
    """Beside the name: what is in use without being named."""
    status: str
    style: str
    details: tuple[str, ...]


def _listed(registry: Registry, device: Device) -> Iterator[tuple[str, list[_Listed]]]:
    """Every kind of plugin of which some are installed, with them."""
    for role in ROLES:
        if rows := explain(registry, role, device):
            yield role, [_listed_row(row) for row in rows]
    if registry.observer_entries:
        yield "observer", [_listed_observer(observer) for observer in registry.observer_entries]


def _listed_row(row: Row) -> _Listed:
    entry, provider = row.entry, row.entry.provider
    origin, details = entry.origin, []
    if provider is not None:
        details.append(f"{origin}, SPI {_version(provider.spi)}, priority {provider.priority}")
        if provider.capabilities:
            details.append(", ".join(sorted(map(str, provider.capabilities))))
    if row.usable:
        status, style = "; ".join(filter(None, ("usable", row.reason))), ""
    elif entry.disabled:
        status, style = f"disabled ({origin})", "dim"
    else:
        status, style = f"not usable ({origin}): {row.reason}", "red"
    return _Listed(entry.name, "auto" if row.auto else "", status, style, tuple(details))


def _listed_observer(observer: ObserverEntry) -> _Listed:
    origin, mark = observer.origin, "global" if observer.is_global else ""
    if observer.disabled:
        return _Listed(observer.name, "", f"disabled ({origin})", "dim", ())
    if observer.error is not None:
        return _Listed(observer.name, mark, f"not usable ({origin}): {observer.error}", "red", ())
    status = "in use in every run" if observer.is_global else "usable, by its name in observers.names"
    return _Listed(observer.name, mark, status, "", (origin,))


def _row_json(row: Row) -> dict[str, Any]:
    entry, provider = row.entry, row.entry.provider
    return {
        "role": entry.role,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "spi": list(provider.spi) if provider else None,
        "priority": provider.priority if provider else None,
        "capabilities": sorted(map(str, provider.capabilities)) if provider else None,
        "devices": sorted(map(str, provider.devices)) if provider else None,
        "disabled": entry.disabled,
        "usable": row.usable,
        "reason": row.reason,
        "auto": row.auto,
    }


def _auto_json(registry: Registry, role: Any, device: Device) -> dict[str, str | None]:
    taken = next((row.entry.name for row in explain(registry, role, device) if row.auto), None)
    return {"name": taken, "error": auto_error(registry, role, device)}


def _observer_json(observer: ObserverEntry) -> dict[str, Any]:
    return {
        "name": observer.name,
        "distribution": observer.distribution,
        "version": observer.version,
        "global": observer.is_global,
        "disabled": observer.disabled,
        "error": observer.error,
    }


def _version(spi: object) -> str:
    return ".".join(map(str, spi)) if isinstance(spi, tuple) else repr(spi)
