"""Reading: TOML files, the files they extend, and overrides, merged into one table that remembers where each value is from."""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli
from attrs import field, frozen

from rlcore.reading import parse_toml
from rlcore.schema.file_limits import expanded, has_home, read_file
from rlcore.schema.suggestions import similar_path
from rlcore.secrets import keep_secrets
from rlcore.spi import ConfigError, Problem, installed_data_sources

Key = tuple[str, ...]

EXTENDS = "extends"
MAX_RECIPE_BYTES = 16 * 2**20
MAX_FILES = 200
"""Files that a recipe extends, those of its own files included."""
COMMAND_LINE = "the command line"
"""The name that messages give to it."""
MODEL_PATHS: tuple[Key, ...] = (("model", "path"), ("reference", "path"), ("critic", "path"))
ADAPTER_PATH: Key = ("lora", "init_from")
DATA_PATHS: tuple[Key, ...] = (("data", "train", "path"), ("data", "evaluation", "path"))


@frozen(kw_only=True)
class Origin:
    """The place in which a value was written."""

    label: str
    """A file's name as the user knows it, or "the command line"."""
    directory: Path
    """The folder from which its relative paths start."""


@frozen(kw_only=True)
class RawRecipe:
    """A recipe as it was written: merged, not yet checked."""

    path: Path
    """The file that the user named."""
    values: Mapping[str, Any]
    """The merged TOML document, without `extends`."""
    origins: Mapping[Key, Origin] = field(factory=dict)
    """The last origin of each value that is no table, and of each empty table."""

    def origin(self, key: Key) -> str | None:
        """Return the place in which the value at `key`, or the first one below or above it, was written; None where nothing
        was."""
        for candidate, origin in self.origins.items():
            shared = min(len(candidate), len(key))
            if candidate[:shared] == key[:shared]:
                return origin.label
        return None


def read_raw(path: Path, overrides: Sequence[str]) -> RawRecipe:
    """Read a recipe, what it extends, and `key.path=value` overrides, of which the later win.

    Values of overrides are TOML; what is not valid TOML is taken as a string, so that `model.path=./dir` needs no quotes.
    Paths in files (model.path, data.*.path, files with functions) that exist beside the file become absolute, on the command
    line those that exist below the working directory.

    Raises ConfigError with every unreadable file, syntax error, cycle of `extends` and malformed override.
    """
    problems: list[Problem] = []
    layers = [*_file_layers(path, (), problems, []), *_override_layers(overrides, problems)]
    return _merged(path, layers, problems)


def raw_from(values: Mapping[str, Any], overrides: Sequence[str], label: str = COMMAND_LINE) -> RawRecipe:
    """`read_raw` of a recipe that is in no file but in `values`, as if these stood in one in the working directory; `label` is
    what messages call it."""
    problems: list[Problem] = []
    document, read = dict(values), list[Path]()
    layers: list[tuple[dict[str, Any], Origin]] = []
    for base in _bases(document, Path(label), problems):
        layers += _file_layers(Path(base), (), problems, read)
    layers += [(document, Origin(label=label, directory=Path.cwd())), *_override_layers(overrides, problems)]
    return _merged(Path(), layers, problems)


def _merged(path: Path, layers: Sequence[tuple[dict[str, Any], Origin]], problems: Sequence[Problem]) -> RawRecipe:
    if problems:
        raise ConfigError(problems)
    tables: dict[str, Any] = {}
    origins: dict[Key, Origin] = {}
    for layer, origin in layers:
        _merge(tables, origins, layer, origin, ())
    _resolve_paths(tables, origins)
    keep_secrets(tables)  # before the first message that shows a value
    return RawRecipe(path=path, values=tables, origins=origins)


def _file_layers(
    path: Path, above: tuple[Path, ...], problems: list[Problem], read: list[Path]
) -> Iterator[tuple[dict[str, Any], Origin]]:
    """Yield the files that `path` extends, first to last, then `path` itself. Each file that is read is added to `read`."""
    read.append(path)
    if len(read) > MAX_FILES:
        if len(read) == MAX_FILES + 1:
            found = f"more than {MAX_FILES} files, each as often as it is extended"
            problems.append(Problem(path=f"{_short(path)}: {EXTENDS}", found=found, expected=f"at most {MAX_FILES}"))
        return
    path = expanded(path)
    real = Path(os.path.realpath(path))  # Path.resolve refuses links that form a loop
    if real in above:
        chain = " -> ".join(_short(file) for file in (*above, path))
        problems.append(
            Problem(path=f"{_short(path)}: {EXTENDS}", found=f"a cycle: {chain}", expected="files that end in one without")
        )
        return
    document = _parse_file(path, above, problems)
    if document is None:
        return
    for base in _bases(document, path, problems):
        yield from _file_layers(path.parent / expanded(base), (*above, real), problems, read)
    yield document, Origin(label=_short(path), directory=path.absolute().parent)


def _bases(document: dict[str, Any], path: Path, problems: list[Problem]) -> list[str]:
    """Takes `extends` out of the document."""
    extends = document.pop(EXTENDS, [])
    bases = [extends] if isinstance(extends, str) else extends
    if isinstance(bases, list) and all(isinstance(base, str) and "\0" not in base for base in bases):
        return bases
    problems.append(
        Problem(
            path=f"{_short(path)}: {EXTENDS}",
            found=repr(extends),
            expected="a file's name, or an array of them",
            remedy=f'For example {EXTENDS} = "base.toml".',
        )
    )
    return []


def _parse_file(path: Path, above: tuple[Path, ...], problems: list[Problem]) -> dict[str, Any] | None:
    """The file's TOML, or None and a problem."""
    try:
        return parse_toml(read_file(path, MAX_RECIPE_BYTES).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        problems.append(
            Problem(path=_short(path), found=f"bytes that are not UTF-8, at {error.start}", expected="a TOML file in UTF-8")
        )
    except tomli.TOMLDecodeError as error:
        problems.append(_syntax_problem(path, error))
    except ValueError as error:  # too deep
        problems.append(Problem(path=_short(path), found=str(error), expected="a recipe in TOML"))
    except OSError as error:
        where = f"; {_short(above[-1])} extends it" if above else ""
        problems.append(
            Problem(
                path=_short(path),
                found=f"{error.strerror or error}{where}".lower(),
                expected="a TOML file that can be read",
                remedy=similar_path(path, "*.toml"),
            )
        )
    return None


def _syntax_problem(path: Path, error: tomli.TOMLDecodeError) -> Problem:
    """Names the line and column, and shows the line."""
    line = error.doc.split("\n")[error.lineno - 1].strip()
    remedy = "Texts need quotes, truth values are true and false, and each key and table is written once."
    found = f"{error.msg:.200} in `{line:.200}`" if line else error.msg
    return Problem(path=f"{_short(path)}:{error.lineno}:{error.colno}", found=found, expected="TOML", remedy=remedy)


def _override_layers(overrides: Sequence[str], problems: list[Problem]) -> Iterator[tuple[dict[str, Any], Origin]]:
    origin = Origin(label=COMMAND_LINE, directory=Path.cwd())
    for override in overrides:
        key, equals, text = override.partition("=")
        path = _parse_key(key.strip()) if equals else None
        if path is None:
            problems.append(
                Problem(
                    path=override,
                    found="no key" if equals else "no =",
                    expected="key.path=value",
                    remedy="For example training.prompts_per_step=8, without spaces or leading dashes.",
                )
            )
        elif path[0] == EXTENDS:
            problems.append(Problem(path=override, found=f"`{EXTENDS}` as an override", expected=f"{EXTENDS} in a recipe file"))
        else:
            value: Any = _parse_value(override, text.strip(), problems)
            for part in reversed(path):
                value = {part: value}
            yield value, origin


def _parse_key(key: str) -> Key | None:
    """The parts of a dotted TOML key, or None where it is none."""
    try:
        nested: Any = parse_toml(f"{key} = 0") if "\n" not in key else None
    except ValueError:
        return None
    parts: list[str] = []
    while nested and isinstance(nested, dict):
        ((part, nested),) = nested.items()
        parts.append(part)
    return tuple(parts) or None


def _parse_value(override: str, text: str, problems: list[Problem]) -> Any:
    """The TOML value; a text that is none is itself, unless it begins like an array, a table or a quoted string."""
    try:
        document = parse_toml(f"value = {text}")
        if document.keys() == {"value"} and "\n" not in text:
            return document["value"]
    except ValueError as error:
        if text[:1] in ("[", "{", '"', "'"):
            remedy = """The shell takes quotes away: put the whole override into single ones, such as 'key=["a", "b"]'."""
            problems.append(
                Problem(
                    path=override, found=f"{text:.200}: {getattr(error, 'msg', error)}", expected="a TOML value", remedy=remedy
                )
            )
    return text


def _merge(target: dict[str, Any], origins: dict[Key, Origin], layer: Mapping[str, Any], origin: Origin, prefix: Key) -> None:
    """Write `layer` over `target`: tables are merged, everything else is replaced."""
    for name, value in layer.items():
        key = (*prefix, name)
        if isinstance(value, dict) and value:
            if not isinstance(target.get(name), dict):
                target[name] = {}
                _forget(origins, key)
            origins.pop(key, None)
            _merge(target[name], origins, value, origin, key)
        elif value != {} or not isinstance(target.get(name), dict):
            _forget(origins, key)
            target[name] = copy.deepcopy(value)
            origins[key] = origin


def _forget(origins: dict[Key, Origin], key: Key) -> None:
    """Drop what is known of `key` and all below it."""
    for old in [old for old in origins if old[: len(key)] == key]:
        del origins[old]


def _resolve_paths(tables: Mapping[str, Any], origins: Mapping[Key, Origin]) -> None:
    """Make the recipe's paths absolute, in place. A Hub name, which does not exist beside the recipe, stays as it is; a
    model's in a folder that does is none. So does a path below a home that is not known, which its field refuses."""
    mixed = [(*path[:-1], "mix", name, path[-1]) for path in DATA_PATHS for name in _table_at(tables, (*path[:-1], "mix"))]
    for key in (*MODEL_PATHS, ADAPTER_PATH, *DATA_PATHS, *mixed):
        section = _table_at(tables, key[:-1])
        value = section.get(key[-1])
        if not isinstance(value, str) or not value or key not in origins or not has_home(value):
            continue
        candidate = origins[key].directory / expanded(value)
        is_file = key == ADAPTER_PATH or _is_of_files(section.get("source")) or value.startswith(("~", "./", "../"))
        is_model = key in MODEL_PATHS and "/" in value and candidate.parent.is_dir()
        if is_file or is_model or candidate.exists():
            section[key[-1]] = os.path.normpath(candidate)


def _is_of_files(source: Any) -> bool:
    provider = installed_data_sources().get(source) if isinstance(source, str) else None
    return provider is not None and provider.path == "file"


def _table_at(tables: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """The table at `key`, or an empty one."""
    table: Any = tables
    for part in key:
        table = table.get(part) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _short(path: Path) -> str:
    """The path as seen from the working directory where it lies below it."""
    absolute = path if path.is_absolute() else Path.cwd() / path
    normal = Path(os.path.normpath(absolute))
    return str(normal.relative_to(Path.cwd())) if normal.is_relative_to(Path.cwd()) else str(normal)
