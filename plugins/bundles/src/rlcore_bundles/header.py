"""The form of bundle.json and texts.json: each key with its type, which a reader checks before anything uses a value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from rlcore.reading import numbers, parse_toml, read_json
from rlcore.schema.constraints import Count, Positive
from rlcore.schema.structure import structure
from rlcore.spi import CheckpointError, FailureKind, Problem
from rlcore_bundles.bundle import OwnStep, Prompts, Weights

FORMATS: Final = {"run": 1, "own loop": 2}
"""The version of the format by what made the step. That of an own loop has `own_step` besides."""
HEADER, TEXTS = "bundle.json", "texts.json"
LONGEST = 80
"""Characters of a value that an error shows."""
OF_RECIPE = ("model", "run", "trainer")
"""Tables of a recipe that a replay reads before the recipe itself is checked."""


def _recipe(instance: object, attribute: Any, value: str) -> None:  # noqa: ARG001 - the form of attrs
    tables = parse_toml(value)
    if wrong := [name for name in OF_RECIPE if not isinstance(tables.get(name), dict)]:
        raise ValueError(f"a recipe without the table [{wrong[0]}]")
    if not isinstance(tables["model"].get("path"), str):
        raise ValueError("a recipe without model.path")


def _environment(instance: object, attribute: Any, value: Mapping[str, Any]) -> None:  # noqa: ARG001 - the form of attrs
    if wrong := [name for name in ("device", "dtype") if not isinstance(value.get(name), str)]:
        raise ValueError(f"{wrong[0]} = {value.get(wrong[0])!r} is no text")
    for name in ("distributions", "files"):
        if not isinstance(value.get(name, {}), dict) or any(type(one) is not str for one in value.get(name, {}).values()):
            raise ValueError(f"{name} is no table of texts")
    if "distributions" not in value:
        raise ValueError("no distributions")


def _number(instance: object, attribute: Any, value: Any) -> None:
    numbers(instance, attribute, {attribute.name: value})


@frozen(kw_only=True)
class _File:
    bytes: Count
    sha256: str


@frozen(kw_only=True)
class _Sampled:
    environment_metrics: Mapping[str, Any] = field(validator=numbers)


@frozen(kw_only=True)
class _Digests:
    before: Mapping[str, Any] = field(validator=numbers)
    after: Mapping[str, Any] = field(validator=numbers)


@frozen(kw_only=True)
class _Update:
    num_loss_tokens: Count
    num_loss_sequences: Count
    schedule_step: int
    loss: str
    loss_config: Mapping[str, Any]
    loss_value: Any = field(validator=_number)
    grad_norm: Any = field(validator=_number)
    learning_rate: Any = field(validator=_number)
    metrics: Mapping[str, Any] = field(validator=numbers)
    gradient_norms: Mapping[str, Any] = field(factory=dict, validator=numbers)


@frozen(kw_only=True)
class _Header:
    format: int
    step: Positive
    weight_version: Count
    recipe: str = field(validator=_recipe)
    environment: Mapping[str, Any] = field(validator=_environment)
    alarm: str
    prompts: Prompts
    metrics: Mapping[str, Any] = field(validator=numbers)
    weights: Weights
    sampled: _Sampled
    updates: tuple[_Update, ...]
    digests: _Digests
    files: Mapping[str, _File]
    own_step: OwnStep | None = None


@frozen(kw_only=True)
class _Ending:
    kind: FailureKind
    reason: str
    masked: bool


@frozen(kw_only=True)
class _Texts:
    rows: tuple[Mapping[str, Any], ...]
    row_hashes: tuple[str, ...]
    reset_seeds: tuple[int, ...]
    responses: tuple[str, ...]
    data_sets: tuple[str, ...]
    weight_version: Count
    oldest_version: int
    num_endings: Count = 0
    endings: Mapping[str, _Ending] = field(factory=dict)


def read_header(directory: Path) -> dict[str, Any]:
    """Return what bundle.json holds. CheckpointError, with every key that is wrong, where there is no such file, its format is
    another one, or it is damaged."""
    path = directory / HEADER
    if not path.is_file():
        raise CheckpointError(f"{directory}: found no {HEADER}; expected the folder of a bundle, as `rlcore record` writes it")
    header = read_json(path)
    known = sorted(FORMATS.values())
    if (found := header.get("format")) not in known or isinstance(found, bool):
        is_newer = isinstance(found, int) and found > known[-1]
        remedy = "Install a newer rlcore-bundles." if is_newer else "Record the step again."
        raise CheckpointError(f"{path}: found format {found!r}; expected {' or '.join(map(str, known))}. {remedy}")
    checked = _checked(path, header, _Header)
    is_own = found == FORMATS["own loop"]
    if is_own != (header.get("own_step") is not None) or (is_own and len(header["updates"]) != 1):
        has = f"format {found} with own_step = {header.get('own_step')!r:.80} and {len(header['updates'])} updates"
        raise CheckpointError(f"{path} is damaged: found {has}; expected own_step and 1 update in format 2 alone. Record again")
    return checked


def own_step_of(header: Mapping[str, Any]) -> OwnStep | None:
    """Return the calls of an own loop that a checked header holds; None in a run's."""
    if header.get("own_step") is None:
        return None
    found: OwnStep = structure(header["own_step"], OwnStep, "own_step")[0]
    return found


def read_texts(directory: Path) -> dict[str, Any]:
    """Return what texts.json holds. CheckpointError where it is damaged."""
    return _checked(directory / TEXTS, read_json(directory / TEXTS), _Texts)


def _checked(path: Path, values: dict[str, Any], cls: Any) -> dict[str, Any]:
    updates = values.get("updates")
    without = values | {"updates": [_without_none(one) for one in updates]} if isinstance(updates, list) else values
    problems = structure(without, cls, path.name)[1]
    if problems:
        lines = [f"  - {problem.path}: {_short(problem)}" for problem in problems]
        raise CheckpointError("\n".join([f"{path.parent} is damaged:", *lines, "Record the step again, or copy it anew."]))
    return values


def _short(problem: Problem) -> str:
    found = problem.found if len(problem.found) <= LONGEST else f"{problem.found[:LONGEST]}…"
    return f"found {found}; expected {problem.expected}"


def _without_none(update: Any) -> Any:
    """The record without keys that are null, such as gradient norms that the trainer did not return."""
    return {name: one for name, one in update.items() if one is not None} if isinstance(update, dict) else update
