"""Find the installed families of models: the entry points of the group `rlcore.architectures`."""

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

from rlcore.installed import distribution_of, installed_entry_points
from rlcore.spi.errors import Problem
from rlcore.spi.provider import ARCHITECTURE_GROUP
from rlcore.time_limit import loading
from rlcore_torchkit.architectures.architecture import Architecture

Families = Mapping[str, Callable[[Mapping[str, Any]], Architecture]]
"""Families of one trainer besides the installed ones: model_type to the function that makes the Architecture of a
config.json."""
NO_FAMILIES: Families = {}
RENAMED: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Model types of the Hub that transformers does not know, with the one under which it has the same layers."""


def installed_model_types() -> tuple[str, ...]:
    """The model_type of every family that is installed, in alphabetical order."""
    return tuple(sorted(_entry_points().names))


def find_architecture(config: Mapping[str, Any], path: str, families: Families = NO_FAMILIES) -> Architecture | Problem:
    """Return the family of the model with this config.json at `path`, of `families` or an installed one; or why there is
    none."""
    model_type = str(config.get("model_type"))
    if model_type in families:
        return families[model_type](config)
    entry_points = list(_entry_points().select(name=model_type))
    found = f"model_type {model_type}"
    if not entry_points and model_type in RENAMED:
        return renamed_problem(model_type, path)
    if not entry_points:
        remedy = f"Use a model of one of these, or install a package with an entry point {model_type} in {ARCHITECTURE_GROUP}"
        return Problem(
            path=path, found=found, expected=f"one of {', '.join(sorted({*installed_model_types(), *families}))}", remedy=remedy
        )
    loaded = [(point, _loaded(point, model_type)) for point in entry_points]
    usable = [(point, family) for point, family in loaded if isinstance(family, Architecture)]
    if len(usable) > 1:
        owners = " and ".join(sorted(_owner(point) for point, _ in usable))
        given = f"{found}, which is a duplicate name: {owners} provide it"
        return Problem(path=path, found=given, expected="one description", remedy="Uninstall the other")
    if usable:  # descriptions that are not usable make no duplicate
        return usable[0][1]
    reasons = "; ".join(f"{_owner(point)} is not usable: {reason}" for point, reason in loaded)
    expected = f"an importable Architecture of model_type {model_type}"
    return Problem(path=path, found=f"{found}, but {reasons}", expected=expected, remedy="Repair or reinstall the package")


def renamed_problem(model_type: str, path: str) -> Problem:
    """Return the refusal of a model_type of RENAMED, in the config.json at `path`."""
    known = RENAMED[model_type]
    return Problem(
        path=path,
        found=f"model_type {model_type}, which transformers has no configuration of: its class comes with the model's code",
        expected=f"{known}, under which transformers has the same layers",
        remedy=f'Set "model_type" to "{known}" in a local config.json, and remove its auto_map',
    )


def _loaded(point: EntryPoint, model_type: str) -> Architecture | str:
    """Return the family that an entry point names, or the reason why it names none."""
    try:
        with loading(f"the description {_owner(point)}"):
            family = point.load()
            if isinstance(family, Architecture) and family.model_type == model_type:
                return family
            return f"found {family!r:.200}; expected an Architecture of model_type {model_type}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a module raises that is imported, such as a panic in Rust
        return f"import failed: {type(error).__name__}: {error}"


def _owner(point: EntryPoint) -> str:
    """Name a description and its distribution; called for messages alone, since reading metadata takes a millisecond."""
    return f"{point.value} of {' '.join(distribution_of(point))}"


def _entry_points() -> EntryPoints:
    """Return the group's entry points."""
    return installed_entry_points().entry_points.select(group=ARCHITECTURE_GROUP)
