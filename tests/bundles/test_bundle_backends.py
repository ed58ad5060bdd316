"""Parts of a bundle that each trainer, and a run on Ray, brings: norms of gradients, digests of refits."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rlcore
from rlcore_bundles.storage import read_bundle
from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_torchkit.digest import tensor_digest


@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_the_norm_of_each_tensors_gradient_reaches_a_bundle(
    trainer: str, recipe_of: Callable[..., Any], sums: Path, tmp_path: Path
) -> None:
    run = rlcore.train(recipe_of(tmp_path, run={"num_steps": 2}, trainer={"name": trainer}), progress="silent")
    bundle = read_bundle(run.path / "bundles" / "step-000002")
    tensors = {name for file in (sums / "model").glob("*.safetensors") for name in load_file(file)}
    assert len(bundle.updates) == 2
    for update in bundle.updates:
        assert update.gradient_norms is not None
        assert set(update.gradient_norms) == tensors
        whole = math.sqrt(sum(norm**2 for norm in update.gradient_norms.values()))
        assert whole == pytest.approx(update.grad_norm, rel=1e-4)


def test_the_digests_of_refits_reach_a_bundle_and_receipts_on_ray(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "run": {"num_steps": 2, "device": "cpu"},
        "cluster": {"execution": "ray", "gpus_per_node": 2},
        "generator": {"name": "transformers"},
        "receipts": {"every_n_steps": 1, "max_waiting": 9},
    }
    with ray_session(RayConfig(gpus_per_node=2, object_store_mib=100), "cpu", None):
        run = rlcore.train(recipe_of(tmp_path, **sections), progress="silent")
    bundle = read_bundle(run.path / "bundles" / "step-000002")
    model = run.path / "bundles" / "step-000002" / "model"
    saved = {name: tensor_digest(one) for file in model.glob("*.safetensors") for name, one in load_file(file).items()}
    assert dict(bundle.digests_before) == saved
    assert bundle.digests_after.keys() == saved.keys()
    assert bundle.digests_after != bundle.digests_before
    metrics = run.metrics
    assert (metrics["receipts/tensors_differing"] == 0).all()
    assert (metrics["receipts/trainer_mean"] < 1e-6).all()
    assert (metrics["receipts/generation_mean"] < 1e-6).all()
