"""On GPUs, in workers on Ray: several ranks of Megatron beside vLLM's engines, of one rank and of two, and engines apart."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, STEPS_ALONE, Workplace, read_metrics  # type: ignore[import-not-found]

NUM_DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
COMMON = (
    "run.device=cuda",
    "run.num_steps=3",
    "model.dtype=bfloat16",
    "generator.name=vllm",
    "generator.vllm.enforce_eager=true",
    "generator.vllm.gpu_memory_utilization=0.1",
    "training.prompts_per_step=16",
    "rollout.samples_per_prompt=8",
    "optimizer.learning_rate=3e-3",
    "rollout.max_response_tokens=12",
    *STEPS_ALONE,
    "cluster.max_restarts=0",
)
MEGATRON = (*COMMON, "trainer.name=megatron")
DENSE = {
    "tp2": ("tensor_parallel=2",),
    "pp2": ("pipeline_parallel=2",),
    "tp2xpp2": ("tensor_parallel=2", "pipeline_parallel=2"),
}
EXPERTS = {
    "ep2": ("expert_parallel=2",),
    "ep2xpp2": ("expert_parallel=2", "pipeline_parallel=2"),
}


def on_devices(name: str) -> object:
    """Of a layout."""
    needed = 4 if "x" in name else 2
    skip = pytest.mark.skipif(needed > NUM_DEVICES, reason=f"needs {needed} CUDA devices, found {NUM_DEVICES}")
    return pytest.param(needed, name, marks=skip, id=name)


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    """One Ray for the module's runs."""
    with ray_session(RayConfig(gpus_per_node=NUM_DEVICES, object_store_mib=1000), "cuda", None):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By architecture; wide enough for the kernels of attention."""
    sizes = {"hidden_size": 256, "num_layers": 4, "initializer_range": 0.03}
    options = {"alphabet": DIGITS, "max_length": 64, "dtype": "bfloat16", **sizes}
    return {name: make_model(tmp_path_factory.mktemp(name) / "model", name, **options) for name in ("qwen3", "qwen3_moe")}


def of_updates(run: Path, metric: str) -> list[float]:
    """Of each step that had something to train on; of more than one, so that what was trained has been generated with."""
    found = [record[metric] for record in read_metrics(run) if record["updates"]]
    assert len(found) > 1
    return found


@pytest.mark.parametrize("engine", ["1", "2"])
@pytest.mark.parametrize(("num_ranks", "name"), [on_devices(name) for name in DENSE])
def test_engines_follow_the_trainer(
    num_ranks: int, name: str, engine: str, workplace: Workplace, models: dict[str, Path]
) -> None:
    """After updates that change each weight by a tenth of its size, which an engine with older weights would show."""
    sizes = (f"trainer.megatron.{size}" for size in DENSE[name])
    places = (f"cluster.gpus_per_node={num_ranks}", f"generator.vllm.tensor_parallel={engine}")
    run = workplace.train("grpo.toml", *MEGATRON, *sizes, *places, f"model.path={models['qwen3']}")
    assert all(error < 1.02 for error in of_updates(run, "token_mult_prob_error"))


@pytest.mark.parametrize(("num_ranks", "name"), [on_devices(name) for name in EXPERTS])
def test_routing_is_replayed(num_ranks: int, name: str, workplace: Workplace, models: dict[str, Path]) -> None:
    """The generator's choices reach the trainer's ranks, whose own routers would make nearly the same."""
    sizes = (f"trainer.megatron.{size}" for size in EXPERTS[name])
    places = (f"cluster.gpus_per_node={num_ranks}", "rollout.replay_routing=true")
    run = workplace.train("grpo.toml", *MEGATRON, *sizes, *places, f"model.path={models['qwen3_moe']}")
    assert all(error < 1.02 for error in of_updates(run, "token_mult_prob_error"))
    assert all(0.9 < found <= 1.0 for found in of_updates(run, "routing_agreement"))


APART = ("cluster.gpus_per_node=2", "cluster.placement=separate", "cluster.generator_gpus_per_node=1", "trainer.name=fsdp2")


@pytest.mark.skipif(NUM_DEVICES < 2, reason=f"needs 2 CUDA devices, found {NUM_DEVICES}")
@pytest.mark.parametrize("delta", ["off", "device", "host"])
def test_parts_come_to_an_engine_apart_as_whole_tensors_do(
    delta: str, tmp_path_factory: pytest.TempPathFactory, workplace: Workplace, models: dict[str, Path]
) -> None:
    """By NCCL both ways. The same seeds draw the same samples from the first weights; the device's sums may differ later."""
    options = (*COMMON, *APART, f"model.path={models['qwen3']}")
    run = workplace.train("grpo.toml", *options, "refit.channel=shards", f"refit.delta={delta}")
    assert all(error < 1.02 for error in of_updates(run, "token_mult_prob_error"))
    broadcast = tmp_path_factory.getbasetemp() / "nccl"
    if not broadcast.exists():
        workplace.train("grpo.toml", *options, "refit.channel=nccl", f"run.directory={broadcast}")
    parts, whole = (read_metrics(each)[0] for each in (run, broadcast / "run"))
    assert parts == {name: pytest.approx(value, rel=1e-3, abs=1e-3) for name, value in whole.items()}


@pytest.mark.skipif(NUM_DEVICES < 3, reason=f"needs 3 CUDA devices, found {NUM_DEVICES}")
@pytest.mark.parametrize("engines", ["replicas=2", "tensor_parallel=2"])
@pytest.mark.parametrize("delta", ["off", "device"])
def test_parts_are_passed_on_between_ranks_apart(
    delta: str, engines: str, workplace: Workplace, models: dict[str, Path]
) -> None:
    """Each of two engines has the trainer's weights, of which half has come to it by the other; each of two ranks of one
    engine has its own parts of them."""
    places = ("cluster.gpus_per_node=3", "cluster.placement=separate", "cluster.generator_gpus_per_node=2")
    generator = (f"generator.vllm.{engines}", "refit.channel=shards", f"refit.delta={delta}")
    run = workplace.train("grpo.toml", *COMMON, *places, "trainer.name=fsdp2", *generator, f"model.path={models['qwen3']}")
    assert all(error < 1.02 for error in of_updates(run, "token_mult_prob_error"))
