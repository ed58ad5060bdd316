"""Check a provider or an observer by its description alone, before the plugin is built.

The fields of config classes are checked too, so that the class of an unused plugin stops no recipe: `rlcore.schema.structure`,
which converts recipes, accepts every class that passes here.
"""

import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from rlcore.gpu import Device
from rlcore.registry.hooks import arguments_problem, observer_problems
from rlcore.registry.plugin_errors import fault_of
from rlcore.schema.describe import SCALARS, default_of, expectation
from rlcore.schema.suggestions import did_you_mean
from rlcore.schema.types import (
    constraints,
    innermost,
    is_array,
    is_attrs,
    is_choice,
    is_mapping,
    is_optional,
    is_union,
    origin,
    plain,
)
from rlcore.spi.capabilities import KNOWN, is_known
from rlcore.spi.cluster import ClusterConfig
from rlcore.spi.provider import Provider, Role
from rlcore.spi.version import SPI_VERSION
from rlcore.spi.weights import DtypeName

DEVICES = frozenset(get_args(Device))
DTYPES = frozenset(get_args(DtypeName))
RESERVED = {
    "name": "a key of each role's section",
    "names": "the key of [sinks]",
    "auto": "what a recipe writes to have a plugin chosen",
}
"""Names that a recipe could not use for a plugin."""
_FUNCTIONS = {
    "unavailable": "that returns a reason or None",
    "disabled_capabilities": "of the config that returns capabilities",
    "num_devices": "of the config that returns a number of devices",
    "shared_kernels": "of the config that returns a name, or None",
    "max_concurrent": "of the config that returns a number of calls, or None",
}
"""A provider's functions, by field."""
OBJECT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The form `package.module:name`."""


def observer_error(observer: object, name: str) -> str | None:
    """Return all faults of the object that the entry point `name` of an observer names, in one text; None without any."""
    if name == "names":
        return "'names' cannot be the name of an observer, since it is a key of [observers]; expected another name"
    if observer is None:
        return "the entry point names None; expected an object with hooks, or a class that is built with an ObserverContext"
    if isinstance(observer, type):
        return "; ".join(_class_problems(observer)) or None  # its hooks are checked once it is built
    from rlcore.spi.generator import GeneratorSpec
    from rlcore.spi.trainer import TrainerSpec

    return "; ".join(observer_problems(observer, (TrainerSpec, GeneratorSpec))) or None


def observer_config(observer: object) -> type | None:
    """The class of an observer's options, which only a class that is built with them can have; None where it takes none."""
    return getattr(observer, "config", None) if isinstance(observer, type) else None


def _class_problems(observer: type) -> Iterator[str]:
    """Why an observer cannot be built from this class."""
    if problem := arguments_problem(observer, "context"):
        yield f"the entry point names {kind_of(observer)}, which {problem}; or name an instance of it"
    config = observer_config(observer)
    if config is not None:
        yield from config_problems(config)


def spi_mismatch(spi: object) -> str | None:
    """Why a provider written for this SPI version does not fit the core's, or None where it does."""
    ours = f"{SPI_VERSION[0]}.{SPI_VERSION[1]}"
    if not (isinstance(spi, tuple) and len(spi) == 2 and all(type(part) is int for part in spi)):
        return f"spi is {spi!r}; expected a pair of integers such as {SPI_VERSION}"
    theirs = f"{spi[0]}.{spi[1]}"
    if spi[0] != SPI_VERSION[0]:
        older = "the plugin" if spi[0] < SPI_VERSION[0] else "rlcore"
        return f"written for SPI {theirs}, but this rlcore has SPI {ours}: another major version; upgrade {older}"
    if spi[1] > SPI_VERSION[1]:
        return f"written for SPI {theirs}, but this rlcore has SPI {ours}: a newer minor version; upgrade rlcore"
    return None


def provider_problems(provider: Provider, name: str, role: Role) -> Iterator[str]:
    """Yield the faults of a role's provider, besides those that any description can have."""
    if name in RESERVED:
        yield f"{name!r} cannot be the name of a plugin, since it is {RESERVED[name]}; expected another name"
    if provider.devices or isinstance(provider.devices, str):
        yield from _choice_problems("devices", provider.devices, DEVICES)
    yield from _choice_problems("dtypes", provider.dtypes, DTYPES)
    for name, form in _FUNCTIONS.items():
        if not callable(value := getattr(provider, name)):
            yield f"{name} is {kind_of(value)}; expected a function {form}"
    yield from _capability_problems(provider.capabilities)
    if role == "execution" and isinstance(provider.config, type) and not issubclass(provider.config, ClusterConfig):
        expected = "a class derived from rlcore.spi.ClusterConfig, of keys in [cluster]"
        yield f"config is {kind_of(provider.config)}; expected {expected}"


def _choice_problems(name: str, found: frozenset[str], choices: frozenset[str]) -> Iterator[str]:
    if isinstance(found, str):
        yield _bare_string(name, found)
    elif not found or not found <= choices:
        yield f"{name} are {sorted(map(str, found))}; expected some of {sorted(choices)}"


def _bare_string(name: str, found: str) -> str:
    return f"{name} are the string {found!r}; expected a set of names, such as {{{found!r}}}"


def _capability_problems(capabilities: frozenset[str]) -> Iterator[str]:
    if isinstance(capabilities, str):
        yield _bare_string("capabilities", capabilities)
        return
    for capability in sorted(capabilities, key=str):
        if not isinstance(capability, str):
            yield f"capability {capability!r} is not a string"
        elif not is_known(capability):
            hint = did_you_mean(capability, KNOWN) or f"; known are {', '.join(sorted(KNOWN))}, one's own contain a colon"
            yield f"unknown capability {capability!r}{hint}"


def config_problems(config: object) -> Iterator[str]:
    """Yield the faults of a class of a table of the recipe."""
    if not isinstance(config, type) or not attrs.has(config):
        yield f"config is {kind_of(config)}; expected a frozen, keyword-only attrs class"
        return
    if not _is_frozen(config):
        yield f"config class {config.__qualname__} is not frozen; define it with attrs.frozen(kw_only=True)"
    positional = [field.name for field in attrs.fields(config) if field.init and not field.kw_only]
    if positional:
        yield f"config class {config.__qualname__} takes {', '.join(positional)} by position; define it with kw_only=True"
    yield from field_problems(config)


def _is_frozen(config: type) -> bool:
    """Found by trying, since attrs' own record of it differs between versions."""
    try:
        setattr(object.__new__(config), "_", None)  # noqa: B010
    except attrs.exceptions.FrozenInstanceError:
        return True
    except AttributeError:
        return False
    return False


def kind_of(found: object) -> str:
    """Return what an object is, for messages."""
    return f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__name__}"


SUPPORTED = "bool, int, float, str, Path, Literal, attrs classes, arrays and tables of these, and unions of these with None"


def field_problems(config: type) -> Iterator[str]:
    """Yield the faults of the fields of an attrs class, and of classes nested in it."""
    problems = [problem for cls in _classes(config) for problem in _own_problems(cls)]
    yield from problems
    if not problems and all(field.default is not attrs.NOTHING for field in attrs.fields(config) if field.init):
        try:
            config()
        except BaseException as error:
            found = f"refuses its defaults: {fault_of(error)}"
            yield f"config class {config.__qualname__} {found}; expected defaults that it accepts, or required fields"


def _classes(config: type) -> Iterator[type]:
    """The class, and every attrs class that its fields name."""
    seen: list[type] = [config]
    for cls in seen:
        yield cls
        if not _unresolved(cls):
            named = [part for field in attrs.fields(cls) for part in innermost(field.type)]
            seen += [part for part in dict.fromkeys(named) if is_attrs(part) and part not in seen]


def _own_problems(cls: type) -> Iterator[str]:
    if reason := _unresolved(cls):
        yield f"the types of config class {cls.__qualname__} cannot be resolved: {reason}"
        return
    for field in attrs.fields(cls):
        if not field.init:
            continue
        where = f"{cls.__qualname__}.{field.name}"
        unsupported = [_shown(part) for part in innermost(field.type) if not _is_supported(part)]
        if unsupported:
            yield f"{where} is of type {', '.join(unsupported)}; expected {SUPPORTED}"
        elif not _default_is(field, partial(_fits, tp=field.type)):
            yield f"{where} has the default {default_of(field)!r}; expected one of its type, {_shown(field.type)}"
        elif not _default_is(field, partial(_is_in_range, tp=field.type)):
            yield f"{where} has the default {default_of(field)!r}; expected {expectation(field.type)}, by the field's range"
        elif place := _place_of_none(field):
            yield f"{where} has None as an item of an array in its {place}: TOML cannot say it; expected items other than None"


def _unresolved(cls: type) -> str | None:
    """Why the annotations of a class name no types, or None where they do."""
    try:
        attrs.resolve_types(cls)
    except Exception as error:
        return fault_of(error)
    return None


def _is_supported(tp: Any) -> bool:
    if typing.get_origin(tp) is Literal:
        return all(isinstance(choice, bool | int | str) for choice in typing.get_args(tp))
    if is_mapping(tp):
        return all(plain(key) in (str, object, Any) for key in typing.get_args(tp)[:1])
    return tp in (*SCALARS, type(None), object, Any) or is_attrs(tp)


def _default_is(field: "attrs.Attribute[Any]", holds: Callable[[Any], bool]) -> bool:
    """Return whether a condition holds for a field's default; True where the default needs an instance."""
    if field.default is attrs.NOTHING or field.converter is not None or getattr(field.default, "takes_self", False):
        return True
    try:
        return holds(default_of(field))
    except Exception:  # building the class reports a factory that fails
        return True


def _is_in_range(default: Any, tp: Any) -> bool:
    """Return whether a default of a type is in its range: a run's saved recipe holds every default, and is validated again."""
    return default is None or all(condition.accepts(default) for condition in constraints(tp))


def _place_of_none(field: "attrs.Attribute[Any]") -> str | None:
    """Return the name of that of a field's type and default which has None as an item of an array; None for neither."""
    if _lists_none_type(field.type):
        return "type"
    try:
        return "default" if _lists_none(default_of(field)) else None
    except Exception:  # building the class reports a factory that fails
        return None


def _lists_none_type(tp: Any) -> bool:
    tp = plain(tp)
    parts = [plain(part) for part in typing.get_args(tp)]
    return any((is_array(tp) and (part is type(None) or is_optional(part))) or _lists_none_type(part) for part in parts)


def _lists_none(value: Any) -> bool:
    if attrs.has(type(value)):
        value = {field.name: getattr(value, field.name) for field in attrs.fields(type(value)) if field.init}
    if isinstance(value, Mapping):
        return any(map(_lists_none, value.values()))
    is_items = isinstance(value, Sequence | AbstractSet) and not isinstance(value, str)
    return is_items and any(item is None or _lists_none(item) for item in value)


def _fits(value: Any, tp: Any) -> bool:
    tp, arguments = plain(tp), typing.get_args(plain(tp))
    if tp in (object, Any):
        return value is None or type(value) in SCALARS or isinstance(value, Path | Mapping | Sequence | AbstractSet)
    if tp is type(None):
        return value is None
    if is_union(tp):
        return any(_fits(value, branch) for branch in arguments)
    if typing.get_origin(tp) is Literal:
        return is_choice(value, arguments)
    if is_array(tp):
        branches = [argument for argument in arguments if argument is not Ellipsis] or [object]
        return isinstance(value, origin(tp)) and all(any(_fits(item, branch) for branch in branches) for item in value)
    if is_mapping(tp):
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values() if arguments)
    if tp is float:
        return type(value) in (int, float) and not math.isnan(value)
    return isinstance(value, tp) if tp is Path or is_attrs(tp) else type(value) is tp


def _shown(tp: Any) -> str:
    return "none given" if tp is None else tp.__qualname__ if isinstance(tp, type) and not typing.get_args(tp) else str(tp)
