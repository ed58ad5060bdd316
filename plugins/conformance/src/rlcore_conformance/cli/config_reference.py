"""`rlcore reference`: every key of a recipe, from the config classes and the docstrings beneath their fields."""

import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
import click

from rlcore.config.convert import CLUSTER, EXECUTION, TABLES, Sections, role_names
from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import discover
from rlcore.run.plan.sections import sections
from rlcore.schema import describe, types
from rlcore.spi import ClusterConfig

INTRODUCTION = """\
# Configuration

```console
$ rlcore config recipe.toml
```

A recipe is a TOML file. This reference is generated from the classes (`rlcore reference`), so it is complete: a key
that is not listed here is an error. Keys without a default must be given. `none` is the value of a key that is left out; TOML
has no way to write it.

- `extends = "base.toml"`, or an array of files, at the top of a recipe reads these files first. Tables are merged; later values
  replace all others. Files are looked up from the recipe that names them.
- `rlcore train recipe.toml training.prompts_per_step=8 model.path=./model` overrides keys. Values are TOML; a value that is not
  valid TOML is a string. An array of strings needs quotes for the shell: `'rollout.stop_strings=["Question:"]'`.
- `model.path`, `reference.path`, `data.train.path` and `data.evaluation.path` are relative to the file that holds them. On the
  command line, they are relative to the working directory, as `run.directory` always is.
- `rlcore check recipe.toml` reports every unknown key, wrong type and impossible combination at once and allocates nothing.
- `rlcore config recipe.toml` prints the recipe as it will run, with every default.
"""

PLUGINS = """\
## Plugins

`[trainer]` and `[generator]` take `name = "auto"`, the usable plugin of the highest priority, or a plugin's name; `[algorithm]`
and `[environment]` have to be named. Each plugin has a table below its role, such as `[trainer.NAME]`, and each sink
and observer that takes options one below `[sinks]` or `[observers]`. Tables of installed plugins that a run does not use are
checked and otherwise ignored, so that one recipe can serve several machines. A note says so of the table of another algorithm
than the recipe's, unless it is of a file that the recipe extends.
"""


@click.command("reference")
def reference_command() -> None:
    """Print every key of a recipe, as Markdown.

    With the sections of all installed plugins.
    """
    click.echo(reference(sections(discover())), nl=False)


def reference(sections: Sections) -> str:
    """The whole reference as Markdown; `sections` holds the plugins' classes by role and name."""
    lines = [INTRODUCTION]
    for name, attribute in describe.fields(Recipe).items():
        if name not in role_names():
            lines.extend(_sections(name, attribute.type))
        if name == CLUSTER:
            for execution, cls in sorted(sections.get(EXECUTION, {}).items()):
                lines.extend(_added_keys(execution, cls))
    for table, cls in sorted(sections.get(TABLES, {}).items()):
        lines.extend(_sections(table, cls))
    lines.append(PLUGINS)
    for role in role_names():
        lines.extend(_sections(role, describe.fields(Recipe)[role].type))
        if doc := describe.docs(Recipe)[role]:
            lines.append(f"{doc}\n")
        classes = sections.get(role, {})
        plugins = {cls: plugin for plugin, cls in classes.items()}
        for plugin, cls in sorted(classes.items()):
            base = next((base for base in cls.__mro__[1:] if base in plugins), None)
            if base is None:
                lines.extend(_sections(f"{role}.{plugin}", cls))
            else:
                lines.extend(_variant(f"{role}.{plugin}", cls, f"{role}.{plugins[base]}", base))
    return "\n".join(lines).rstrip() + "\n"


def _sections(path: str, tp: object, brackets: str = "[{}]") -> Iterator[str]:
    """A class's table, then those of the classes nested in it; `brackets` of its heading."""
    cls = types.table_class(tp)
    if cls is None:
        return
    rows = {name: field for name, field in describe.fields(cls).items() if name != "options" or path not in role_names()}
    plain = {name: field for name, field in rows.items() if types.table_class(field.type) is None}
    note = _first_line(cls)
    if plain or note:
        yield f"## `{brackets.format(path)}`\n"
        if note:
            yield f"{note}\n"
    if plain:
        yield from _table(cls, plain)
    for name, field in rows.items():
        for item in filter(types.is_attrs, types.innermost(field.type)):
            if name in plain and any(map(types.is_array, (field.type, *types.alternatives(field.type)))):
                yield from _sections(f"{path}.{name}", item, "[[{}]]")
            elif name in plain:  # a table of tables
                yield from _sections(f"{path}.{name}.NAME", item)
        if name not in plain:
            if doc := describe.docs(cls)[name]:
                yield f"`[{path}.{name}]`: {doc}\n"
            yield from _sections(f"{path}.{name}", field.type)


def _added_keys(execution: str, cls: type) -> Iterator[str]:
    """The keys that an execution adds to those of every [cluster]."""
    common = describe.fields(ClusterConfig)
    added = {name: field for name, field in describe.fields(cls).items() if name not in common}
    if added:
        yield f"## `[cluster]` of `{execution}`\n"
        yield f"The execution `{execution}` adds these keys.\n"
        yield from _table(cls, {name: field for name, field in added.items() if types.table_class(field.type) is None})
        for name, field in added.items():
            yield from _sections(f"cluster.{name}", field.type)


def _table(cls: type, rows: "Mapping[str, attrs.Attribute[Any]]") -> Iterator[str]:
    yield "| Key | Type | Default | Meaning |"
    yield "|---|---|---|---|"
    yield from (_row(cls, name, field) for name, field in rows.items())
    yield ""


def _variant(path: str, cls: type, base_path: str, base: type) -> Iterator[str]:
    """Yield the differences of a class that is another plugin's with other defaults."""
    inherited = describe.fields(base)
    changed = {
        name: field
        for name, field in describe.fields(cls).items()
        if name not in inherited or describe.default_of(field) != describe.default_of(inherited[name])
    }
    yield f"## `[{path}]`\n"
    others = f"The keys of `[{base_path}]`" + (", with other defaults:" if changed else ".")
    yield f"{_first_line(cls)} {others}".lstrip() + "\n"
    if changed:
        yield "| Key | Default |"
        yield "|---|---|"
        yield from (f"| `{name}` | {_default(field)} |" for name, field in changed.items())
        yield ""


def _first_line(cls: type) -> str:
    """The class's docstring without the `[section]` that it begins with; attrs' own where it has none is left out."""
    doc = " ".join((cls.__doc__ or "").split()) if "__doc__" in vars(cls) else ""
    if doc.startswith("`["):
        doc = doc.partition(": ")[2]
    return "" if doc.startswith("Method generated by attrs") else doc[:1].upper() + doc[1:]


def _row(cls: type, name: str, field: "attrs.Attribute[Any]") -> str:
    cells = (f"`{name}`", type_name(field.type), _default(field), describe.docs(cls)[name])
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def type_name(tp: object) -> str:
    """A type for the reference: `int`, `"a"` or `"b"`, array of `str`, `str` or none, `int` of at least 1."""
    if conditions := types.constraints(tp):
        return describe.conditioned(type_name(types.plain(tp)), conditions)
    tp = types.plain(tp)
    if types.is_union(tp):
        branches = types.alternatives(tp)
        comma = "," if any(types.is_constrained(branch) for branch in branches) else ""
        return " or ".join(type_name(branch) for branch in branches) + (f"{comma} or none" if types.is_optional(tp) else "")
    if typing.get_origin(tp) is Literal:
        return ", ".join(f"`{describe.toml_literal(choice)}`" for choice in typing.get_args(tp) if choice is not None)
    if types.is_array(tp):
        return f"array of {type_name(types.item_type(tp))}"
    if types.is_table(tp):
        return "table"
    return "any" if tp in (object, Any) else f"`{getattr(tp, '__name__', str(tp)).lower()}`"


def _default(field: "attrs.Attribute[Any]") -> str:
    default = describe.default_of(field)
    if default is attrs.NOTHING:
        return "(required)"
    if default is None:
        return "none"
    if isinstance(default, set | frozenset):
        default = sorted(default)
    return f"`{describe.toml_literal(default)}`"
