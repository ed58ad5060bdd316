"""Calls an adapter in the environment of its framework: the program that `rlcore compare` runs there.

It reads request.json and request.safetensors in the folder that is its argument, and writes answer.json and answer.safetensors
to it. Nothing else of rlcore need be installed there.
"""

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any


def register_packages(folders: Mapping[str, str]) -> None:
    """Make packages importable from their folders, without the environment that these are of."""
    for name, folder in folders.items():
        spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py", submodule_search_locations=[folder])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def answer(folder: Path) -> dict[str, Any]:
    """Call the adapter; return what answer.json holds."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    register_packages(request["packages"])
    try:
        import torch
        from safetensors.torch import load_file, save_file
    except ModuleNotFoundError as error:
        return {"missing": error.name, "text": str(error)}

    from rlcore_bundles.peers.contract import PeerError, Setup

    setup = Setup(**request["setup"] | {"checkout": request["checkout"] and Path(request["checkout"])})
    module, _, name = request["adapter"].partition(":")
    try:
        peer = getattr(importlib.import_module(module), name)(setup)
    except ModuleNotFoundError as error:
        return {"missing": error.name, "text": str(error)}
    except PeerError as error:
        return {"error": str(error)}
    arrays = load_file(folder / "request.safetensors")
    found: dict[str, Any] = {}
    reasons, failures = dict(peer.reasons), dict[str, str]()
    metrics: dict[str, float] = {}
    for dtype in (torch.float32, torch.float64):
        # Constants that the framework makes are of the same dtype.
        torch.set_default_dtype(dtype)
        batches = _batches(arrays, request["counts"], dtype)
        for part in ("advantages", "loss"):
            if part not in batches or part in reasons:
                continue
            try:
                terms, metrics = _terms(peer, part, batches[part], request["has"])
            except PeerError as error:
                reasons[part] = str(error)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                failures[part] = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
                reasons[part] = failures[part]
            else:
                found |= {f"{dtype}".removeprefix("torch.") + f"/{term}": one for term, one in terms.items()}
    save_file({name: one.contiguous() for name, one in found.items()}, folder / "answer.safetensors")
    return {
        "version": peer.version,
        "functions": list(peer.functions),
        "settings": {name: _plain(value) for name, value in peer.settings.items()},
        "unmapped": list(peer.unmapped),
        "metric_names": dict(peer.metric_names),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "reasons": reasons,
        "failures": failures,
    }


def _batches(arrays: Mapping[str, Any], counts: Mapping[str, int], dtype: Any) -> dict[str, Any]:
    from rlcore_bundles.peers.contract import Samples, Update

    found: dict[str, Any] = {}
    kinds: Any = (("advantages", Samples, {}), ("loss", Update, counts))
    for part, kind, more in kinds:
        values = {one.name: arrays[f"{part}/{one.name}"] for one in fields(kind) if f"{part}/{one.name}" in arrays}
        if values:
            values = {name: one.to(dtype) if one.is_floating_point() else one for name, one in values.items()}
            found[part] = kind(**values, **more)
    return found


def _terms(peer: Any, part: str, batch: Any, has: Mapping[str, bool]) -> tuple[dict[str, Any], dict[str, float]]:
    """The terms of one part, each at loss tokens, and the metrics."""
    from rlcore_bundles.peers.terms import LossTerms

    if part == "advantages":
        found = peer.advantages(replace(batch, rewards=batch.rewards.clone()))
        found = found[:, None] if found.ndim == 1 else found
        return {"advantages": found.expand(batch.mask.shape)[batch.mask]}, {}
    terms = LossTerms(peer.loss, batch, **has)
    return {name: one[batch.mask] if (one := terms[name]).ndim else one[None] for name in terms.names}, terms.metrics


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "answer.json").write_text(json.dumps(answer(place)), encoding="utf-8")
