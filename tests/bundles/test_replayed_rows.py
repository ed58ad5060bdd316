"""A step whose algorithm reads the rows of its prompts, or whose teacher reads other prompts, is computed again."""

from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore_bundles.difference import first_difference
from rlcore_bundles.replay import replay
from rlcore_bundles.storage import read_bundle
from rlcore_torchkit.testing.models import make_model

ROWS = [{"prompt": f"{a}+{b}=", "privileged_context": str(a + b), "completion": str(a + b)} for a in range(4) for b in range(4)]
TEMPLATE = "{prompt}{demonstration};{prompt}"


@pytest.mark.wide(keep=["sdft-policy", "lmbda"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sdft", {"teacher": "policy", "teacher_prompt_template": TEMPLATE}),
        ("sdft", {"teacher_prompt_template": TEMPLATE}),
        ("distill", {"beta": 0.5, "lmbda": 0.5}),
    ],
    ids=["sdft-policy", "sdft-reference", "lmbda"],
)
def test_nothing_differs(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = str(make_model(tmp_path / "model", alphabet="0123456789+=;", max_length=32))
    recipe: dict[str, Any] = {
        "model": {"path": model},
        "reference": {"path": model},
        "algorithm": {"name": name, name: options},
        "environment": {"name": "unrewarded"},
        "run": {"name": "run", "directory": str(tmp_path), "num_steps": 2},
        "rollout": {"samples_per_prompt": 2, "max_prompt_tokens": 12, "max_response_tokens": 4},
        "training": {"prompts_per_step": 8},
        "optimizer": {"learning_rate": 1e-3},
        "logging": {"bundles_every_n_steps": 2, "bundle_weights": "state"},
        "sinks": {"names": []},
    }
    if options.get("teacher") == "policy":
        del recipe["reference"]
    run = rlcore.train(recipe, dataset=ROWS, progress="silent")
    assert first_difference(replay(read_bundle(run.path / "bundles" / "step-000002")).rows) is None
