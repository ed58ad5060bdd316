"""Calls an adapter in a process of the environment in which its framework is installed, over safetensors and JSON."""

import importlib.util
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import frozen
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor

import rlcore_bundles
from rlcore.installed import installed_entry_points
from rlcore.published_plugins import how_to_install
from rlcore.registry.run_parts import functions
from rlcore.registry.states import named_state
from rlcore.spi import ConfigError, PluginError, Problem
from rlcore.spi.provider import group_of
from rlcore_bundles.compared_batch import ComparedBatch
from rlcore_bundles.interpreters import executable, run_python
from rlcore_bundles.peer_comparison import PeerTerms, has_of
from rlcore_bundles.peer_dumps import Dump
from rlcore_bundles.peers import worker

LIMIT_S = 3600
"""Seconds that a framework's process may take."""
SHOWN = 12
"""Lines of a failed process that an error shows."""


@frozen(kw_only=True, eq=False)
class Called:
    """The answer of an adapter."""

    version: str
    functions: list[str]
    settings: Mapping[str, Any]
    unmapped: list[str]
    terms: PeerTerms
    reasons: Mapping[str, str]
    """The reasons why "advantages" or "loss" is missing."""
    failures: Mapping[str, str]
    """Errors of the framework's code."""


def adapter(name: str) -> Callable[..., Any]:
    """The installed adapter of a framework. PluginError where no package has it."""
    state = named_state(functions("peer", name=name), name)
    if state is None:
        names = sorted(installed_entry_points().entry_points.select(group=group_of("peer")).names)
        hint = how_to_install("peer", name, names)
        problem = f"--with: found {name!r}; expected a framework with an adapter: {', '.join(names) or 'none is installed'}"
        raise PluginError(f"{problem}. {hint}".removesuffix(". "))
    if not state.is_usable or state.entry.function is None:
        raise PluginError(f"the adapter {name!r} is {state.text}")
    return state.entry.function


def call_adapter(
    name: str, batch: ComparedBatch, overrides: Mapping[str, str], *, python: Path | None = None, checkout: Path | None = None
) -> Called:
    """Call an adapter in the environment of `python`, or in that of this process. ConfigError where the framework is missing
    there, or the adapter cannot be used with it."""
    function = adapter(name)
    program = executable(python)
    if checkout is not None and not checkout.is_dir():
        raise ConfigError([Problem(path="--checkout", found=f"{checkout}, no folder", expected="the framework's sources")])
    module = inspect.unwrap(function).__module__
    with tempfile.TemporaryDirectory(prefix="rlcore-compare-") as folder:
        place = Path(folder)
        _write_request(place, batch, f"{module}:{function.__name__}", overrides, checkout)
        found = _run(program, place, name)
        _require_answer(name, found, program, function)
        arrays = load_file(place / "answer.safetensors")
    narrow, wide = (
        {term.removeprefix(f"{dtype}/"): one for term, one in arrays.items() if term.startswith(f"{dtype}/")}
        for dtype in ("float32", "float64")
    )
    return Called(
        version=found["version"],
        functions=found["functions"],
        settings=found["settings"],
        unmapped=found["unmapped"],
        terms=PeerTerms(terms=narrow, wide=wide, metrics=found["metrics"], metric_names=found["metric_names"]),
        reasons={**found["reasons"], **batch.reasons},
        failures=found["failures"],
    )


def written(dump: Dump, batch: ComparedBatch) -> Called:
    """The advantages that a dump holds, as if the framework had been called."""
    assert dump.advantages is not None
    terms = PeerTerms(terms={"advantages": dump.advantages.astype(np.float32)}, wide={"advantages": dump.advantages})
    return Called(
        version=dump.path.name, functions=[], settings={}, unmapped=[], terms=terms, reasons=batch.reasons, failures={}
    )


def _write_request(
    place: Path, batch: ComparedBatch, adapter_path: str, overrides: Mapping[str, str], checkout: Path | None
) -> None:
    arrays: dict[str, Tensor] = {}
    counts = {}
    for part, of in (("advantages", batch.own.samples), ("loss", batch.own.update)):
        for one in () if of is None else fields(of):
            value = getattr(of, one.name)
            if isinstance(value, Tensor):
                arrays[f"{part}/{one.name}"] = value.contiguous().clone()
            else:
                counts[one.name] = value
    save_file(arrays, place / "request.safetensors")
    setup = {one.name: getattr(batch.setup, one.name) for one in fields(batch.setup)} | {"overrides": dict(overrides)}
    package = adapter_path.partition(":")[0].partition(".")[0]
    folders = {"rlcore_bundles": str(Path(rlcore_bundles.__file__).parent)}
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        folders[package] = next(iter(spec.submodule_search_locations))
    request = {
        "adapter": adapter_path,
        "packages": folders,
        "setup": setup | {"checkout": None},
        "checkout": None if checkout is None else str(checkout.absolute()),
        "counts": counts,
        "has": has_of(batch.own.options),
    }
    (place / "request.json").write_text(json.dumps(request), encoding="utf-8")


def _run(python: str, place: Path, name: str) -> Any:
    # The program is read, not run by its path: its folder has modules with the names of frameworks.
    program = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    ran = run_python(
        python,
        ["-c", program, worker.__file__, str(place)],
        folder=place,
        limit_s=LIMIT_S,
        TORCHDYNAMO_DISABLE="1",  # compiled functions are called as they are written
    )
    if not (place / "answer.json").is_file():
        found = f"ended with exit code {ran.exit_code} in {python}:\n{ran.last_lines(SHOWN)}"
        raise PluginError(f"the adapter {name!r} {found}")
    return json.loads((place / "answer.json").read_text(encoding="utf-8"))


def _require_answer(name: str, found: Mapping[str, Any], python: str, function: Callable[..., Any]) -> None:
    if "error" in found:
        raise ConfigError([Problem(path=f"--with {name}", found=found["error"], expected="settings that it can compute")])
    if "missing" in found:
        how = getattr(inspect.getmodule(function), "INSTALL", "Install it there.").format(python=python)
        what = f"{python} does not import it: {found['text']}"
        remedy = f"{how} Another environment is named with --python."
        raise ConfigError(
            [Problem(path=f"--with {name}", found=what, expected="the framework, torch and safetensors", remedy=remedy)]
        )


def as_record(called: Called) -> dict[str, Any]:
    """The framework's part of the JSON output."""
    return {name: value for name, value in attrs.asdict(called, recurse=False).items() if name != "terms"}
