"""The page for a terminal."""

import textwrap
from collections.abc import Iterator
from typing import Any

import click

from rlcore.schema.printable import printable


def lines_of(page: dict[str, Any], width: int) -> Iterator[str]:
    """Yield the lines of the page."""
    sections: dict[str, list[tuple[str, str]]] = {
        "Machine": list(_machine(page)),
        "Libraries": [*map(_library, page["libraries"]), *((name, "not installed") for name in page["not_installed"])],
        f"Packages of rlcore (interface {_version(page['interface'])})": [
            (one["name"], " ".join(filter(None, (one["version"], one["source"])))) for one in page["packages"]
        ],
        "Plugins of others": list(_others(page)),
    }
    for heading, rows in sections.items():
        yield click.style(heading, bold=True)
        yield from _rows(rows or [("none", "")], width)
    for note in page["notes"]:
        yield from textwrap.wrap(printable(f"note: {note}"), width)
    problems = page["problems"]
    if not problems:
        yield click.style("Everything fits together.", fg="green")
        return
    yield click.style(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}", fg="red", bold=True)
    for problem in problems:
        lines = printable(problem["found"]).splitlines() or [""]
        yield from textwrap.wrap(lines[0], width, initial_indent="- ", subsequent_indent="  ")
        yield from (f"  {line}" for line in lines[1:])
        if problem["remedy"]:
            yield click.style(f"    {printable(problem['remedy'])}", bold=True)  # on one line, to be copied


def _rows(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    names = max(len(name) for name, _ in rows)
    for name, text in rows:
        indent = " " * (names + 4)
        first = f"  {name:<{names}}  "
        yield from textwrap.wrap(
            printable(text), max(width, len(indent) + 20), initial_indent=first, subsequent_indent=indent
        ) or [first.rstrip()]


def _machine(page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    python, system = page["python"], page["system"]
    yield "Python", f"{python['version']} ({python['implementation']}) in {python['prefix']}"
    memory = "" if system["memory_gib"] is None else f", {system['memory_gib']} GiB"
    yield "System", f"{system['platform']}, {system['processors']} processors{memory}"
    yield from (("GPU", ", ".join(gpu.values())) for gpu in page["gpus"] or [{"name": "none"}])
    yield from page["variables"].items()


def _library(row: dict[str, Any]) -> tuple[str, str]:
    result = row["import"]
    build = f"build for {'CPUs' if row['build'] == 'cpu' else row['build']}" if row["build"] else ""
    how = "cannot be imported" if "error" in result else "not imported in time" if "late" in result else ""
    seconds = f"imported in {result['seconds']} s" if "seconds" in result else how
    return row["name"], ", ".join(filter(None, (row["version"], build, seconds)))


def _others(page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for package in page["others"]:
        plugins = [row for row in page["plugins"] if row["distribution"] == package["name"]]
        named = [f"{row['role']} {row['name']} (interface {_version(row['spi'])}, {row['state']})" for row in plugins]
        yield package["name"], "; ".join([" ".join(filter(None, (package["version"], package["source"]))), *named])


def _version(spi: list[int] | None) -> str:
    return "unknown" if spi is None else ".".join(map(str, spi))
