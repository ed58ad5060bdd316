"""`rlcore plugins`: what is installed, what is usable or why not, and which one "auto" would take."""

import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

from rlcore.plugins.device import detect_device
from rlcore.plugins.discovery import ObserverEntry, Registry, discover
from rlcore.plugins.selection import AUTO_ROLES, Row, auto_error, explain
from rlcore.spi.provider import ROLES
from rlcore.spi.version import SPI_VERSION

if TYPE_CHECKING:
    from rich.table import Table

Device: TypeAlias = Literal["cpu", "cuda"]
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


def plugins_table(registry: Registry, device: Device) -> "Table":
    """The listing as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Plugins for rlcore's SPI {_version(SPI_VERSION)}, device {device}", title_justify="left")
    for column in ("role", "name", "distribution", "version", "SPI", "priority", "capabilities", "usable", "auto"):
        table.add_column(column, no_wrap=column not in ("capabilities", "usable"))
    for role in ROLES:
        for row in explain(registry, role, device):
            style = "" if row.usable else "dim" if row.entry.disabled else "red"
            table.add_row(*(Text(cell) for cell in _cells(row)), style=style)
        table.add_section()
    for observer in registry.observer_entries:
        status = "disabled" if observer.disabled else observer.error or "yes"
        cells = ("observer", observer.name, observer.distribution, observer.version, "", "", "", status, "")
        table.add_row(*(Text(cell) for cell in cells))
    return table


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print the listing as JSON.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Device to run on."
)
def plugins_command(as_json: bool, device: Literal["auto", "cpu", "cuda"]) -> None:
    """List the installed plugins, and which ones "auto" takes.

    A broken plugin is listed with its error and does not change the exit code.
    """
    registry = discover()
    place = detect_device() if device == "auto" else device
    if as_json:
        click.echo(json.dumps(plugins_json(registry, place), indent=2))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    console.print(plugins_table(registry, place))
    for line in _footnotes(registry, place):
        console.print(line, markup=False, highlight=False)


def _footnotes(registry: Registry, device: Device) -> list[str]:
    errors = [error for role in AUTO_ROLES if registry.of(role) and (error := auto_error(registry, role, device))]
    return [*errors, *(f"warning: {warning}" for warning in registry.warnings)]


def _cells(row: Row) -> tuple[str, ...]:
    entry, provider = row.entry, row.entry.provider
    usable = row.reason if not row.usable else f"yes; {row.reason}" if row.reason else "yes"
    return (
        entry.role,
        entry.name,
        entry.distribution,
        entry.version,
        _version(provider.spi) if provider else "?",
        str(provider.priority) if provider else "?",
        ", ".join(sorted(map(str, provider.capabilities))) if provider else "?",
        usable or "",
        "auto" if row.auto else "",
    )


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
        "disabled": observer.disabled,
        "error": observer.error,
    }


def _version(spi: object) -> str:
    return ".".join(map(str, spi)) if isinstance(spi, tuple) else repr(spi)
