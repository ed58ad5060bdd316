"""On GPUs: receipts of the steps, and a step in a file, which another backend computes again on the processor."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlcore_bundles.certificate.certificate import certificate
from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, Workplace, read_metrics  # type: ignore[import-not-found]
from .test_cluster_gpu import COMMON  # type: ignore[import-not-found]

NUM_DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(NUM_DEVICES < 2, reason=f"needs 2 CUDA devices, found {NUM_DEVICES}"),
]
RECORDED = (
    "receipts.every_n_steps=1",
    "receipts.max_waiting=3",
    "logging.bundles_every_n_steps=1",
    "logging.bundle_weights=state",
)
PARALLEL = ("pipeline_parallel=1", "context_parallel=1", "expert_parallel=1")
TRAINERS = {
    "fsdp2": ("trainer.name=fsdp2",),
    "megatron": ("trainer.name=megatron", "trainer.megatron.tensor_parallel=2", *(f"trainer.megatron.{p}" for p in PARALLEL)),
}


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    """One Ray for the module's runs."""
    with ray_session(RayConfig(gpus_per_node=2, object_store_mib=1000), "cuda", None):
        yield


@pytest.mark.parametrize("trainer", TRAINERS)
def test_receipts_hold_and_a_step_is_computed_again(trainer: str, workplace: Workplace, tmp_path: Path) -> None:
    """Two ranks train beside vLLM; the run is copied to the folder that $RLCORE_KEEP_BUNDLES names."""
    sizes = {"hidden_size": 128, "num_layers": 2, "initializer_range": 0.03}
    model = make_model(tmp_path / "model", alphabet=DIGITS, max_length=64, dtype="bfloat16", **sizes)
    places = ("cluster.gpus_per_node=2", f"model.path={model}")
    run = workplace.train("grpo.toml", *COMMON, *TRAINERS[trainer], *places, *RECORDED)
    if keep := os.environ.get("RLCORE_KEEP_BUNDLES"):
        shutil.copytree(run, Path(keep) / trainer)
    records = [record for record in read_metrics(run) if "receipts/trainer_mean" in record]
    assert len(records) == 3
    for record in records:
        assert record["receipts/trainer_mean"] < 0.05
        assert record["receipts/generation_mean"] < 0.05
        assert record["receipts/tensors_differing"] == 0
    claims = {claim.name: claim for claim in certificate(run, replays=True).claims}
    assert [f"{claim.name}: {claim.text}" for claim in claims.values() if claim.verdict == "not held"] == []
    assert {claims[name].verdict for name in ("refits", "receipts", "losses in float64", "bundles", "replays")} == {"held"}
