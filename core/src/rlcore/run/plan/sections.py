"""The recipe's sections for plugins: which there are, what a plugin's own holds, and its paths."""

import copy
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from rlcore.config.convert import CLUSTER, EXECUTION, OBSERVERS, SINKS, TABLES, convert, selected_options
from rlcore.config.load import COMMAND_LINE, RawRecipe
from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import Entry, ObserverEntry, Registry, discover, load_group
from rlcore.registry.plugin_errors import listing_error
from rlcore.registry.run_parts import LoopObserverEntry
from rlcore.registry.selection import AUTO, select
from rlcore.registry.states import InstalledT, entries_by_name, named_state, states_of
from rlcore.schema import describe
from rlcore.schema.constraints import PathBesideRecipe
from rlcore.schema.file_limits import expanded, has_home
from rlcore.schema.structure import structure
from rlcore.schema.suggestions import did_you_mean
from rlcore.schema.types import marks
from rlcore.spi import ROLES, ClusterConfig, ConfigError, Note, PluginError, Problem, Role, capabilities


def convert_recipe(raw: RawRecipe, registry: Registry | None = None) -> tuple[Recipe, Registry]:
    """Convert a recipe by the sections of the installed plugins, for which `registry` stands in. Returns these as well."""
    registry = registry or discover(_disabled_plugins(raw.values))
    found = sections(registry)
    cluster = _cluster_class(raw.values.get(CLUSTER), registry)
    return convert(with_plugin_paths(raw, found), found, unchecked(registry), cluster), registry


def execution_needs(cluster: ClusterConfig | None) -> dict[str, str]:
    """Capabilities that the section [cluster] needs of an execution; none without it, as then one process does everything."""
    if cluster is None:
        return {}
    num_ranks = cluster.nodes * cluster.gpus_per_node
    if num_ranks > 1:
        return {capabilities.MULTI_RANK: f"[cluster] has {num_ranks} ranks"}
    return {capabilities.MULTI_RANK: "[cluster] without cluster.execution"} if cluster.execution == AUTO else {}


def _cluster_class(table: object, registry: Registry) -> type[ClusterConfig] | None:
    """Return the class of [cluster] of a recipe not yet checked: that of the execution that it will be run by, if any."""
    name = table.get(EXECUTION, AUTO) if isinstance(table, Mapping) else AUTO
    try:
        needs = execution_needs(ClusterConfig()) if name == AUTO else {}
        entry = select(registry, "execution", str(name), device="cpu", needs=needs)
    except PluginError:
        return None
    return None if entry.provider is None else entry.provider.config


def unread_cluster_keys(raw: RawRecipe, registry: Registry) -> list[str]:
    """Return a note for each key of [cluster] that no usable execution reads, where none is usable: another one may read it, or
    it is mistyped."""
    table, known = raw.values.get(CLUSTER), describe.fields(ClusterConfig)
    if not isinstance(table, Mapping) or _cluster_class(table, registry) is not None:
        return []
    return [f"{CLUSTER}.{key} is read by no usable execution{did_you_mean(key, known)}" for key in table if key not in known]


def unread_options(raw: RawRecipe, recipe: Recipe) -> list[Note]:
    """Tables of other algorithms than the recipe's, which would be read in vain. Those of a file that this recipe extends are
    left unsaid: they are of the algorithm that stood there."""
    name = recipe.algorithm.name
    chosen_by = raw.origin(("algorithm", "name"))
    written: dict[str, set[str]] = {}
    for key, origin in raw.origins.items():
        if key[0] == "algorithm" and len(key) > 1 and key[1] not in ("name", name):
            written.setdefault(key[1], set()).add(origin.label)
    return [
        Note(
            path=f"algorithm.{other}",
            text=f"is not read: algorithm.name is {describe.toml_literal(name)}, whose options are below [algorithm.{name}]",
        )
        for other, origins in written.items()
        if chosen_by == COMMAND_LINE or origins & {chosen_by, COMMAND_LINE}
    ]


def _disabled_plugins(values: Mapping[str, Any]) -> tuple[str, ...]:
    """`plugins.disable` of a recipe not yet checked; a wrong type is reported with everything else, later."""
    section = values.get("plugins")
    names = section.get("disable") if isinstance(section, Mapping) else None
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list | tuple) else ()


@frozen(kw_only=True)
class NoOptions:
    """`[observers.NAME]`: takes no options."""


def sections(registry: Registry) -> dict[str, dict[str, type]]:
    """Return, by section of the recipe, the config class of each plugin's name."""
    found: dict[str, dict[str, type]] = {
        _section(role): {
            name: entry.provider.config for name, entry in entries_by_name(registry.of(role)).items() if entry.provider
        }
        for role in ROLES
    }
    observers = entries_by_name(registry.observer_entries)
    of_loop = entries_by_name(load_group(LoopObserverEntry, TABLES))
    tables = {name: entry.provider.config for name, entry in of_loop.items() if entry.provider and entry.provider.config}
    if taken := [of_loop[name].label for name in tables if name in describe.fields(Recipe)]:
        raise listing_error("found observers with the name of a section of rlcore; RLCORE_DISABLE_PLUGINS disables them", taken)
    return found | {OBSERVERS: {name: entry.config or NoOptions for name, entry in observers.items()}, TABLES: tables}


def unchecked(registry: Registry) -> dict[str, dict[str, str]]:
    """Return, by section of the recipe, each name without a usable plugin and its state. Its options cannot be checked."""
    known = sections(registry)
    found = {_section(role): _others(registry.of(role), known[_section(role)]) for role in ROLES}
    return found | {OBSERVERS: _others(registry.observer_entries, known[OBSERVERS])}


def _others(entries: Sequence[InstalledT], known: Collection[str]) -> dict[str, str]:
    states = states_of(entry for entry in entries if entry.name not in known)
    return {name: state.text for name in {state.entry.name for state in states} if (state := named_state(states, name))}


def plugin_config(recipe: Recipe, entry: Entry) -> Any:
    """The recipe's section for a plugin."""
    assert entry.provider is not None
    if entry.role == EXECUTION:
        return entry.provider.config() if recipe.cluster is None else recipe.cluster
    section = _section(entry.role)
    return selected_options(getattr(recipe, section), section, entry.name, entry.provider.config)


def reference_config(recipe: Recipe, entry: Entry) -> Any:
    """The options of the trainer's plugin for a reference on devices of its own: those of the trainer, but for what
    `reference.trainer` says. ConfigError with all that is wrong in there."""
    config = plugin_config(recipe, entry)
    cls: Any = type(config)
    given = {} if recipe.reference is None else dict(recipe.reference.trainer)
    if not given:
        return config
    found, problems = structure(given, cls, "reference.trainer")
    if problems:
        raise ConfigError(problems)
    names = {key: attribute.name for key, attribute in describe.fields(cls).items()}
    return evolve(config, **{names[key]: getattr(found, names[key]) for key in given})


def _section(role: Role) -> str:
    """The recipe's section that chooses plugins of a role."""
    return SINKS if role == "sink" else role


def observer_options(recipe: Recipe, observers: Sequence[ObserverEntry]) -> dict[str, object]:
    """The recipe's section of each of these that takes options, by name. ConfigError names all required keys left out."""
    options: dict[str, object] = {}
    problems: list[Problem] = []
    for entry in observers:
        if entry.config is not None:
            try:
                options[entry.name] = selected_options(recipe.observers, OBSERVERS, entry.name, entry.config)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return options


def with_plugin_paths(raw: RawRecipe, sections: Mapping[str, Mapping[str, type]]) -> RawRecipe:
    """Make the paths in plugins' sections absolute, where a field's type says that it is one of a file beside the recipe.
    `sections` has each installed plugin's config class, by role and name."""
    values = copy.deepcopy(dict(raw.values))
    fields = [
        ((name,) if role == TABLES else (role, name), key, mark)
        for role, plugins in sections.items()
        for name, cls in plugins.items()
        for key, attribute in describe.fields(cls).items()
        for mark in marks(attribute.type, PathBesideRecipe)
    ]
    for place, key, mark in fields:
        section: Any = values
        for part in place:
            section = section.get(part) if isinstance(section, dict) else None
        origin = raw.origins.get((*place, key))
        if isinstance(section, dict) and key in section and origin is not None:
            section[key] = _absolute(section[key], origin.directory, mark)
    return evolve(raw, values=values)


def _absolute(value: Any, directory: Path, mark: PathBesideRecipe) -> Any:
    """A path, or an array of such, in a directory. A function's file that is not there may lie in the working directory."""
    if isinstance(value, list):
        return [_absolute(item, directory, mark) for item in value]
    file, end = value if isinstance(value, str) else "", ""
    if mark.names_function:
        file, colon, function = file.rpartition(":")
        end = f"{colon}{function}"
    if not has_home(file) or not isinstance(value, str):
        return value
    candidate = directory / expanded(file)
    if mark.names_function and not (file.endswith(".py") and (candidate.is_file() or not Path(file).is_file())):
        return value
    return f"{os.path.normpath(candidate)}{end}"
