"""Writes a recipe as TOML, with all defaults. It loads back to an equal recipe, except for secrets."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlcore.config.plugin_choice import NamedPluginChoice, ObserversConfig, PluginChoice, SinksConfig
from rlcore.config.recipe import Recipe
from rlcore.schema.describe import key_of, toml_key, toml_literal
from rlcore.secrets import masked_table


def dump_toml(recipe: Recipe, chosen: Mapping[str, str] | None = None, observers: Collection[str] = ()) -> str:
    """The recipe as TOML. Keys that are None, which TOML cannot say, appear as comments; in the tables of an array they are
    left out. MASK stands for secrets. ValueError where an item of an array is None, or a key whose default is another value.

    [evaluation] is left out where there is no held-out set. `chosen` maps roles to the plugin that fills each; the sections of
    the others are left out where they hold nothing but defaults. So are those of sinks that the recipe does not name, and of
    observers that are neither named by the recipe nor in `observers`, the names of all in use.
    """
    table = masked_table(_table(recipe, chosen or {}))
    table |= table.pop("tables")
    table["sinks"] = masked_table(_several(recipe.sinks, recipe.sinks.names or ()))
    table["observers"] = masked_table(_several(recipe.observers, {*recipe.observers.names, *observers}))
    if recipe.data.evaluation is None:  # nothing heeds these keys, so that a recipe may not have them
        del table["evaluation"]
    return "\n".join(_section((), table)).lstrip("\n") + "\n"


def _table(value: Any, chosen: Mapping[str, str]) -> dict[str, Any]:
    """An attrs object as nested dicts and lists of TOML's types, and None."""
    table: dict[str, Any] = {}
    for attribute in attrs.fields(type(value)):
        if not attribute.init:
            continue
        key, item = key_of(attribute), getattr(value, attribute.name)
        if isinstance(item, PluginChoice | NamedPluginChoice):
            table[key] = _choice(item, chosen.get(key))
        elif item is not None or attribute.default is None:
            table[key] = _plain(item)
        else:
            raise ValueError(f"{key} is None, which TOML cannot say, and its default is {attribute.default!r}")
    return table


def _choice(choice: PluginChoice | NamedPluginChoice, chosen: str | None) -> dict[str, Any]:
    """`name` and one table per plugin."""
    kept = {
        plugin: options
        for plugin, options in choice.options.items()
        if chosen in (None, plugin) or plugin == choice.name or not _is_default(options)
    }
    return {"name": choice.name, **{plugin: _plain(options) for plugin, options in kept.items()}}


def _several(section: SinksConfig | ObserversConfig, used: Collection[str]) -> dict[str, Any]:
    """`names` and one table per plugin that has options."""
    kept = {name: _plain(options) for name, options in section.options.items() if name in used or not _is_default(options)}
    return {"names": section.names and list(section.names), **{name: table for name, table in kept.items() if table}}


def _is_default(options: object) -> bool:
    try:
        return options == type(options)()
    except TypeError:
        return False


def _plain(item: Any) -> Any:
    if attrs.has(type(item)):
        return _table(item, {})
    if isinstance(item, Mapping):
        return {key: _plain(value) for key, value in item.items()}
    if isinstance(item, frozenset | set):
        return sorted(_plain(value) for value in item)
    if isinstance(item, Sequence) and not isinstance(item, str):
        return [_plain(value) for value in item]
    return str(item) if isinstance(item, Path) else item


def _section(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table: its values, then the tables in it."""
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (values or not table):
        yield f"\n[{'.'.join(map(toml_key, path))}]"
    for key, value in values.items():
        try:
            yield f"# {toml_key(key)} = none" if value is None else f"{toml_key(key)} = {toml_literal(value)}"
        except ValueError as error:
            raise ValueError(f"{'.'.join(map(toml_key, (*path, key)))}: {error}") from error
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _section((*path, key), value)
