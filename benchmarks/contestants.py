"""GRPO by rlcore in this process, and the options of TRL that all comparisons have. TRL's own environment has no rlcore."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUIET = {"logging.rollouts_every_n_steps": 0, "sinks.names": [], "checkpoint.at_end": False}
"""Keys of a recipe that writes nothing while its steps are timed."""
QUIET_TRL = {
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1000,
    "disable_tqdm": True,
    "lr_scheduler_type": "constant",
}
"""The same of TRL's GRPOConfig, with a constant rate."""


def train_rlcore(
    keys: Mapping[str, Any], progress: Any, overrides: Sequence[str] = (), environment: Any = None
) -> Mapping[str, Any]:
    """Train by a recipe with these keys, with the provider of an environment that is not installed; return the summary."""
    from attrs import evolve

    from rlcore.registry.discovery import Registry, discover
    from rlcore.run.plan.prepare import prepare
    from rlcore.run.train import train

    registry = discover()
    if environment is not None:
        own = Registry.from_providers({"environment": [environment]}).entries
        registry = evolve(registry, entries=(*registry.entries, *(one for one in own if one.distribution == "in-process")))
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "recipe.toml"
        whole = {"run.directory": directory, **QUIET, **keys}
        recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in whole.items()))
        return train(prepare(recipe, overrides, registry=registry), resume=False, progress=progress)
