"""Conversion of a raw recipe to a Recipe: each section through the strict converter, all problems together."""

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from attrs import define, field

from rlcore.config.load import RawRecipe
from rlcore.config.plugin_choice import NamedPluginChoice, ObserversConfig, PluginChoice, SinksConfig
from rlcore.config.recipe import Recipe
from rlcore.config.validate import find_problems
from rlcore.published_plugins import how_to_install, remedy_for
from rlcore.schema import describe
from rlcore.schema.structure import missing_key, structure, unknown_key
from rlcore.schema.suggestions import nearest
from rlcore.schema.types import table_class
from rlcore.spi import ClusterConfig, ConfigError, Problem

Sections = Mapping[str, Mapping[str, type]]
"""Section of Recipe, which is a role, "sinks" or "observers" -> plugin -> the class of its section. Those of "execution" are
classes of [cluster], those of "loop_observer" of whole tables of the recipe."""
Unchecked = Mapping[str, Mapping[str, str]]
"""Section -> plugin whose options nothing can check -> what it is instead of usable."""
Choice: TypeAlias = PluginChoice | NamedPluginChoice | SinksConfig | ObserversConfig
"""A section that chooses plugins, and holds a table for each."""
SINKS, OBSERVERS, CLUSTER, EXECUTION, TABLES = "sinks", "observers", "cluster", "execution", "loop_observer"


def convert(
    raw: RawRecipe,
    sections: Sections,
    unchecked: Unchecked | None = None,
    cluster: type[ClusterConfig] | None = ClusterConfig,
) -> Recipe:
    """Check a recipe whole and convert it. `sections` has each installed plugin's config class, by role and name, and `cluster`
    is that of [cluster], None where no usable execution has one. Tables of `unchecked` plugins are kept as they are: whether
    one of these is selected is for the selection to judge.

    In the result, `options` of a role holds an object for every plugin in `sections`, but for those whose class refuses to be
    made without keys and that the recipe neither selects by name nor gives a table.

    Raises ConfigError with every unknown key, wrong type, missing key, value out of range and impossible combination.
    """
    recipe, problems = _Conversion(raw, sections, unchecked or {}, cluster).run()
    if problems or recipe is None:
        raise ConfigError([_with_origin(problem, raw) for problem in problems])
    return recipe


def selected_options(choice: Choice, role: str, name: str, config: type) -> object:
    """The options of the plugin that was selected; ConfigError where its required keys are not given, since "auto" took
    it, or since it is a global observer."""
    if name in choice.options:
        return choice.options[name]
    options, problems = structure({}, config, f"{role}.{name}")
    if problems:
        raise ConfigError(problems)
    return options


def role_names() -> tuple[str, ...]:
    """The sections of Recipe that choose plugins."""
    return tuple(name for name, attribute in describe.fields(Recipe).items() if _choice_class(attribute.type))


def _choice_class(tp: object) -> type[Any] | None:
    """The class of the section where it is a Choice."""
    classes = [branch for branch in (*typing.get_args(tp), tp) if branch in typing.get_args(Choice)]
    return classes[0] if classes else None


def _choice_key(role: str) -> str:
    """The key of a section that chooses plugins, besides their tables."""
    return "names" if role in (SINKS, OBSERVERS) else "name"


def _with_origin(problem: Problem, raw: RawRecipe) -> Problem:
    origin = raw.origin(tuple(problem.path.split("[")[0].split("."))) if problem.found != "nothing" else None
    return attrs.evolve(problem, origin=origin or "")


@define
class _Conversion:
    """Collects problems over all sections, so that one error can report them together."""

    raw: RawRecipe
    sections: Sections
    unchecked: Unchecked
    cluster: type[ClusterConfig] | None
    problems: list[Problem] = field(factory=list)
    unknown_names: list[Problem] = field(factory=list)
    """Names without a usable plugin. Reported along with other problems; alone, plugin selection reports them in detail."""

    def run(self) -> tuple[Recipe | None, list[Problem]]:
        """The Recipe, or None and its problems."""
        parts: dict[str, Any] = {}
        for name, attribute in describe.fields(Recipe).items():
            choice = _choice_class(attribute.type)
            if name not in self.raw.values:
                if attribute.default is attrs.NOTHING:
                    self._require(name, attribute.type)
                elif choice and choice is not NamedPluginChoice:
                    parts[name] = self._choice(name, choice, {})
            elif choice:
                parts[name] = self._choice(name, choice, self.raw.values[name])
            elif name == CLUSTER:
                parts[name] = self._cluster(self.raw.values[name])
            else:
                parts[name] = self._section(name, attribute.type)
        own = self.sections.get(TABLES, {})
        parts["tables"] = {name: self._section(name, own[name]) for name in own if name in self.raw.values}
        for name in self.raw.values.keys() - describe.fields(Recipe).keys() - own.keys():
            install, place = how_to_install(TABLES, name, ()), self._section_of(name)
            problem = unknown_key(name, [*describe.fields(Recipe), *own], place)
            missing = install.startswith("Run") and not place  # rather than a mistyped name
            self.problems.append(attrs.evolve(problem, remedy=install) if missing else problem)
        whole = self._with_stand_ins(parts)
        self.problems.extend(find_problems(whole, self._broken()))
        self.problems.extend(self._unheeded_evaluation(whole))
        self.problems += self.unknown_names if self.problems else []
        return (None if self.problems else _recipe(parts)), self.problems

    def _section(self, name: str, cls: Any) -> Any:
        value, problems = structure(self.raw.values[name], cls, name)
        self.problems.extend(self._hinted(problem) for problem in problems)
        return value

    def _cluster(self, table: object) -> Any:
        """`[cluster]` by the class of the execution that runs it. Where none is usable, which selection reports, keys that only
        that may know are left out."""
        cls: Any = self.cluster or ClusterConfig
        if self.cluster is None and isinstance(table, Mapping):
            names = list(describe.fields(cls))
            for key in table.keys() - names:
                problem = unknown_key(f"{CLUSTER}.{key}", names)
                missing = f"An execution that reads it may be missing. {remedy_for('execution')}"
                self.unknown_names.append(attrs.evolve(problem, remedy=" ".join(filter(None, (problem.remedy, missing)))))
            table = {key: value for key, value in table.items() if key in names}
        value, problems = structure(table, cls, CLUSTER)
        self.problems.extend(self._hinted(problem) for problem in problems)
        return value

    def _choice(self, role: str, cls: type[Any], table: object) -> Any:
        """`[role]`: its `name`, or `names` of sinks and observers, and one object per plugin."""
        key = _choice_key(role)
        if not isinstance(table, Mapping):
            found = describe.describe_value(table)
            value = found.rpartition(" (")[0] if key == "name" else f"[{found.rpartition(' (')[0]}]"
            remedy = f"Write [{role}] and below it {key} = {value}." if isinstance(table, str) else ""
            self.problems.append(Problem(path=role, found=found, expected="a table", remedy=remedy))
            return None
        choice, problems = structure({key: table[key]} if key in table else {}, cls, role)
        self.problems.extend(problems)
        plugins = self.sections.get(role, {})
        options = dict(self._options(role, plugins, table))
        kept = {key: table[key] for key in self.unchecked.get(role, ()) if isinstance(table.get(key), Mapping)}
        for unknown in table.keys() - plugins.keys() - kept.keys() - {key}:
            self.problems.append(self._unknown_plugin(role, unknown, table[unknown]))
        if choice is not None and role in self.sections:
            self.unknown_names += self._unknown_names(role, getattr(choice, key))
        return attrs.evolve(choice, options=options | kept) if choice is not None else None

    def _options(self, role: str, plugins: Mapping[str, type], table: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
        written = table.get(_choice_key(role))
        named = written if isinstance(written, list | tuple) else [written]
        for plugin, cls in plugins.items():
            value, problems = structure(table.get(plugin, {}), cls, f"{role}.{plugin}")
            # Nobody asked for it: required keys, and checks that refuse the defaults, matter once "auto" takes it.
            if plugin in table or plugin in named:
                self.problems.extend(self._hinted(problem) for problem in problems)
            if value is not None:
                yield plugin, value

    def _unknown_names(self, role: str, chosen: str | Sequence[str] | None) -> Iterator[Problem]:
        """Yield a problem for each plugin that the recipe names and that is not installed, or whose options are unknown."""
        known, unfit = {*self.sections.get(role, {}), PluginChoice().name}, self.unchecked.get(role, {})
        for name in [chosen] if isinstance(chosen, str) else chosen or ():
            if name not in known:
                remedy = "" if name in unfit else how_to_install(role.removesuffix("s"), name, known)
                found = describe.toml_literal(name) + (f", which is {unfit[name]}" if name in unfit else "")
                path = f"{role}.{_choice_key(role)}"
                yield Problem(path=path, found=found, expected=self._installed(role), remedy=remedy)

    def _installed(self, role: str) -> str:
        return f"an installed {role.removesuffix('s')}: {', '.join(sorted(self.sections.get(role, {}))) or 'none'}"

    def _unknown_plugin(self, role: str, key: str, value: object) -> Problem:
        """Either an option written one level too high, or a section of a plugin that is not there."""
        plugins, installed = self.sections.get(role, {}), self._installed(role)
        install = how_to_install(role.removesuffix("s"), key, plugins)
        near = nearest(key, [_choice_key(role), *plugins])
        remedy = f"Did you mean {role}.{near}?" if near else ""
        if isinstance(value, Mapping):
            remedy = f"Did you mean [{key}]?" if key in describe.fields(Recipe) else remedy
            return Problem(
                path=f"{role}.{key}",
                found=f"options of a plugin that is not installed or not usable: {key}",
                expected=installed,
                remedy=remedy or install or "`rlcore plugins` lists all of them, with the reason where one is not usable.",
            )
        owners = [f"{role}.{plugin}.{key}" for plugin, cls in plugins.items() if key in describe.fields(cls)]
        remedy = f"Did you mean {' or '.join(owners)}?" if owners else remedy
        expected = f"{_choice_key(role)}, or the table of {installed}"
        return Problem(path=f"{role}.{key}", found="an unknown key", expected=expected, remedy=remedy)

    def _require(self, name: str, tp: object) -> None:
        """A section that every recipe needs is missing: name the keys it must have."""
        cls: Any = _choice_class(tp) or tp
        for key, attribute in describe.fields(cls).items():
            if attribute.default is attrs.NOTHING:
                self.problems.append(self._hinted(missing_key(f"{name}.{key}", cls, key)))

    def _hinted(self, problem: Problem) -> Problem:
        """Adds where else an unknown key exists, and to a missing plugin name those installed."""
        section, _, name = problem.path.rpartition(".")
        if problem.found == "nothing" and name == "name" and self.sections.get(section):
            return attrs.evolve(problem, remedy=f"Installed: {', '.join(sorted(self.sections[section]))}.")
        if problem.found != "an unknown key" or problem.remedy:
            return problem
        return attrs.evolve(problem, remedy=self._section_of(name))

    def _unheeded_evaluation(self, recipe: Recipe) -> Iterator[Problem]:
        """Keys of [evaluation] that ask for something, defaults written out too, where nothing is held out to evaluate on."""
        written, broken = self.raw.values.get("evaluation"), self._broken()
        if (
            recipe.data.evaluation is not None
            or not isinstance(written, Mapping)
            or any(key.startswith("data") for key in broken)
        ):
            return
        for key, value in written.items():
            turned_off = key in ("every_n_steps", "at_start", "at_end") and value in (0, False)
            if f"evaluation.{key}" not in broken and not turned_off:
                yield Problem(
                    path=f"evaluation.{key}",
                    found=f"{describe.toml_literal(value)}, without a [data.evaluation]",
                    expected="a held-out set",
                    remedy="Write [data.evaluation]; empty, it takes the environment's own held-out rows.",
                )

    def _section_of(self, key: str) -> str:
        """A did-you-mean with the full path of every key, and of the section, of this name, and of where it names a plugin."""
        tables: dict[str, type] = {}
        for name, attribute in describe.fields(Recipe).items():
            if not _choice_class(attribute.type):
                tables |= _tables_below(name, attribute.type)
        for role, plugins in self.sections.items():
            prefix = "" if role == TABLES else f"{role}."
            tables |= {CLUSTER if role == EXECUTION else f"{prefix}{plugin}": cls for plugin, cls in plugins.items()}
        places = [f"[{key}]"] if key in describe.fields(Recipe) else []
        places += [f"{path}.{key}" for path, cls in tables.items() if key in describe.fields(cls)]
        places += [f'"{key}" in {role}.names' for role in (SINKS, OBSERVERS) if key in self.sections.get(role, {})]
        return f"Did you mean {' or '.join(places)}?" if places else ""

    def _broken(self) -> tuple[str, ...]:
        return tuple(problem.path.partition("[")[0] for problem in self.problems)

    def _with_stand_ins(self, parts: Mapping[str, Any]) -> Recipe:
        """A recipe to check further though parts of it are broken: these are left out key by key, and not judged again."""
        whole: dict[str, Any] = {"tables": parts["tables"]}
        for name, attribute in describe.fields(Recipe).items():
            if parts.get(name) is not None:
                whole[name] = parts[name]
            elif name in self.raw.values and not _choice_class(attribute.type):
                whole[name] = _partial_config(self.raw.values[name], table_class(attribute.type))
            elif attribute.default is attrs.NOTHING or name in self.raw.values:
                whole[name] = _stand_in(_choice_class(attribute.type) or attribute.type)
        return _recipe(whole)


def _recipe(parts: Mapping[str, Any]) -> Recipe:
    """The recipe with these parts, by key."""
    return Recipe(**{"async_" if key == "async" else key: part for key, part in parts.items()})


def _tables_below(path: str, tp: object) -> dict[str, type]:
    """The attrs class at `path` and those nested in it, by path."""
    cls = table_class(tp)
    found: dict[str, type] = {} if cls is None else {path: cls}
    for name, attribute in () if cls is None else describe.fields(cls).items():
        found |= _tables_below(f"{path}.{name}", attribute.type)
    return found


def _partial_config(table: object, cls: Any) -> Any:
    """A section with every key that cannot be used left out, and stand-ins for required ones, so that the rest of the recipe
    can be checked in the same pass: a wrong type would otherwise hide impossible combinations until it is corrected."""
    written = table if isinstance(table, Mapping) else {}
    kept: dict[str, Any] = {}
    for name, attribute in describe.fields(cls).items():
        if name in written:
            kept |= _partial_key(name, written[name], attribute.type)
        if name not in kept and attribute.default is attrs.NOTHING:
            kept[name] = _stand_in(attribute.type)
    return cls(**kept)


def _partial_key(name: str, value: object, tp: Any) -> dict[str, Any]:
    """{name: value}, or nothing where the value is of a wrong type."""
    nested = table_class(tp)
    if nested and isinstance(value, Mapping):
        return {name: _partial_config(value, nested)}
    made, problems = structure(value, tp, "")
    return {} if problems else {name: made}


def _stand_in(tp: Any) -> Any:
    """Some value of the type, for a required key that is missing."""
    return _partial_config({}, tp) if attrs.has(tp) else tp()
