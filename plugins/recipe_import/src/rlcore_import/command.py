"""`rlcore import`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import tomli_w

from rlcore.files import NAMED_OUTPUT, write_atomically
from rlcore.installed import installed_entry_points
from rlcore.published_plugins import how_to_install
from rlcore.registry.plugin_errors import attributed, in_time
from rlcore.registry.run_parts import functions
from rlcore.registry.states import named_state
from rlcore.spi import PluginError
from rlcore.spi.provider import group_of
from rlcore_import.recipe import ImportedRecipe, Unmapped

LONGEST_VALUE = 80


@click.command("import")
@click.argument("library")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A new file for the recipe; else it is printed.")
def import_command(library: str, file: Path, overrides: tuple[str, ...], output: Path | None) -> None:
    """Turn the recipe of another library into one of rlcore.

    LIBRARY is the name under which an installed package reads that library's recipes. Keys without a counterpart are listed, as
    comments in the recipe and on stderr, those first that change what is trained.
    """
    if output is not None:
        _require_new(output)
    found = importer(library)(file, overrides)
    text = recipe_text(found, f"{library} {file.name}")
    if output is None:
        click.echo(text, nl=False)
    else:
        write_atomically(output, text, NAMED_OUTPUT)
    for line in summary(found):
        click.echo(line, err=True)


def _require_new(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise click.UsageError(f"--output: found {output}, which exists; expected a file to be made: name another one")
    if not output.parent.is_dir():
        raise click.UsageError(f"--output: found {output}, whose folder is not there; expected one that is: make it first")


def importer(library: str) -> Callable[[Path, Sequence[str]], ImportedRecipe]:
    """The function that reads a library's recipes. PluginError where no package has it."""
    state = named_state(functions("importer", name=library), library)
    if state is None:
        names = sorted(installed_entry_points().entry_points.select(group=group_of("importer")).names)
        hint = how_to_install("importer", library, names)
        problem = f"nothing imports recipes of {library!r}; importers are installed for {', '.join(names) or 'none'}"
        raise PluginError(f"{problem}. {hint}".removesuffix(". "))
    if not state.is_usable:
        raise PluginError(f"importer {library!r} is {state.text}")
    entry, function = state.entry, state.entry.function
    assert function is not None

    def read(file: Path, overrides: Sequence[str]) -> ImportedRecipe:
        with attributed("raised by", entry.label), in_time(entry.label):
            found = function(file, overrides)
        if not isinstance(found, ImportedRecipe):
            raise PluginError(f"{entry.label} returned {found!r:.60}; expected an ImportedRecipe")
        return found

    return read


def recipe_text(found: ImportedRecipe, origin: str) -> str:
    """The recipe as TOML, with what has no counterpart in comments above."""
    lines = [f"# Imported from {origin}."]
    for title, of in _groups(found):
        lines += ["#", f"# {title}:", *(f"#   {_line(one)}" for one in of)]
    if found.num_off:
        lines += ["#", f"# {found.num_off} other keys switch off what there is no counterpart of."]
    return "\n".join((*lines, "", tomli_w.dumps(_tables(found.values))))


def _groups(found: ImportedRecipe) -> Iterator[tuple[str, list[Unmapped]]]:
    changing = [one for one in found.unmapped if one.changes_meaning]
    others = [one for one in found.unmapped if not one.changes_meaning]
    if changing:
        yield "Not the same here, which changes what is trained", changing
    if others:
        yield "Without a counterpart, which changes speed, memory or logs", others


def _line(one: Unmapped) -> str:
    value = " ".join(repr(one.value).split())
    return f"{one.key} = {value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + '...'}: {one.why}"


def summary(found: ImportedRecipe) -> Iterator[str]:
    """Yield the lines for stderr."""
    for title, of in _groups(found):
        yield f"{title}:"
        yield from (f"  {_line(one)}" for one in of)
    changing = sum(one.changes_meaning for one in found.unmapped)
    told = f"{len(found.unmapped)} without a counterpart, of which {changing} change what is trained"
    yield f"{len(found.values)} keys written; {told}"


def _tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables of dotted keys, `run` and `model` first."""
    first = ("run", "model", "algorithm", "environment", "data", "rollout", "async", "training", "optimizer", "schedule")
    tables: dict[str, Any] = {name: {} for name in first}
    for key, value in values.items():
        *names, last = key.split(".")
        table = tables
        for name in names:
            table = table.setdefault(name, {})
        table[last] = value
    return {name: table for name, table in tables.items() if table}
