"""On GPUs, in workers on Ray: what crosses from a trainer to engines, by each channel and in each kind of training."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attrs import frozen

from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, Workplace, read_metrics  # type: ignore[import-not-found]
from .test_cluster_gpu import COMMON  # type: ignore[import-not-found]

NUM_DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def together(devices: int) -> tuple[str, ...]:
    """Trainer and engines share the devices."""
    return (f"cluster.gpus_per_node={devices}",)


def apart(devices: int, generating: int) -> tuple[str, ...]:
    """The engines have `generating` of the devices, the trainer the others."""
    return (*together(devices), "cluster.placement=separate", f"cluster.generator_gpus_per_node={generating}")


def megatron(**sizes: int) -> tuple[str, ...]:
    """Megatron with these parallel sizes, which default to 1."""
    sizes = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), 1) | sizes
    return ("trainer.name=megatron", *(f"trainer.megatron.{name}={size}" for name, size in sizes.items()))


def fsdp2(**sizes: int) -> tuple[str, ...]:
    return ("trainer.name=fsdp2", *(f"trainer.fsdp2.{name}={size}" for name, size in sizes.items()))


@frozen
class Crossing:
    """A run's options, and what its token_mult_prob_error stays below in each step that follows an update."""

    devices: int
    options: tuple[str, ...]
    model: str = "qwen3"
    bound: float = 1.02


ENGINE_TP2, REPLICAS_2 = "generator.vllm.tensor_parallel=2", "generator.vllm.replicas=2"
SHARDS, NCCL, DELTA = "refit.channel=shards", "refit.channel=nccl", "refit.delta=device"
LORA = ("lora.rank=8", "lora.alpha=16")
LOOSE = "training.max_token_mult_prob_error=10.0"  # random weights of experts, and weights in 8 bits
PPO = (
    "algorithm.name=ppo",
    "rollout.samples_per_prompt=1",
    "training.prompts_per_step=64",
    "training.minibatches_per_step=2",
    "critic.learning_rate=0.01",
)
KEPT_SETS = ("rollout.top_k=8", "run.num_steps=8", "training.prompts_per_step=32")
OFFLOAD = "offload.trainer=all"
MOE, FP8 = "qwen3_moe", "trainer.megatron.fp8=true"
CROSSINGS = {
    "megatron tp2 to tp2": Crossing(4, (*megatron(tensor_parallel=2), *apart(4, 2), ENGINE_TP2, SHARDS)),
    "megatron tp2 to tp2, delta": Crossing(4, (*megatron(tensor_parallel=2), *apart(4, 2), ENGINE_TP2, SHARDS, DELTA)),
    "megatron tp2 to tp2, nccl": Crossing(4, (*megatron(tensor_parallel=2), *apart(4, 2), ENGINE_TP2, NCCL)),
    "megatron pp2 to 2, delta": Crossing(4, (*megatron(pipeline_parallel=2), *apart(4, 2), REPLICAS_2, SHARDS, DELTA)),
    "fsdp2 of 2 to tp2": Crossing(4, (*fsdp2(), *apart(4, 2), ENGINE_TP2, SHARDS)),
    "fsdp2 of 3 to 1": Crossing(4, (*fsdp2(), *apart(4, 1), SHARDS)),
    "fsdp2 ep2 to tp2": Crossing(4, (*fsdp2(expert_parallel=2), *apart(4, 2), ENGINE_TP2, SHARDS, LOOSE), MOE, 1.1),
    "megatron ep2 to tp2, delta": Crossing(
        4, (*megatron(expert_parallel=2), *apart(4, 2), ENGINE_TP2, SHARDS, DELTA, LOOSE), MOE, 1.1
    ),
    "megatron ep2 to tp2, replayed routing": Crossing(
        4, (*megatron(expert_parallel=2), *apart(4, 2), ENGINE_TP2, SHARDS, "rollout.replay_routing=true"), MOE
    ),
    "adapters unmerged, nccl": Crossing(2, (*fsdp2(), *LORA, *apart(2, 1), "refit.adapters=unmerged", NCCL), bound=1.03),
    "adapters merged, nccl": Crossing(2, (*fsdp2(), *LORA, *apart(2, 1), "refit.adapters=merged", NCCL), bound=1.03),
    "adapters, megatron tp2": Crossing(2, (*megatron(tensor_parallel=2), *LORA, *together(2)), bound=1.03),
    "adapters merged, megatron tp2 to tp2": Crossing(
        4, (*megatron(tensor_parallel=2), *LORA, *apart(4, 2), ENGINE_TP2, SHARDS, "refit.adapters=merged"), bound=1.03
    ),
    "critic, fsdp2 of 2": Crossing(2, (*fsdp2(), *PPO, *together(2))),
    "critic, megatron tp2": Crossing(2, (*megatron(tensor_parallel=2), *PPO, *together(2))),
    "critic, megatron pp2 to 1": Crossing(3, (*megatron(pipeline_parallel=2), *PPO, *apart(3, 1), SHARDS)),
    "kept sets, fsdp2 of 2": Crossing(2, (*fsdp2(), *together(2), *KEPT_SETS, "rollout.top_p=0.9")),
    "kept sets, megatron tp2 and engine tp2": Crossing(
        2, (*megatron(tensor_parallel=2), *together(2), ENGINE_TP2, *KEPT_SETS, "rollout.top_p=0.9")
    ),
    "kept sets, megatron cp2": Crossing(2, (*megatron(context_parallel=2), *together(2), *KEPT_SETS)),
    "one step ahead, delta": Crossing(
        3, (*fsdp2(), *apart(3, 2), ENGINE_TP2, SHARDS, DELTA, "async.max_staleness=1", "run.num_steps=5"), bound=1.5
    ),
    "8 bits, megatron of 2": Crossing(2, (*megatron(), *together(2), FP8, LOOSE), bound=1.5),
    "8 bits, megatron tp2 and engine": Crossing(
        2, (*megatron(tensor_parallel=2), *together(2), FP8, "generator.vllm.quantization=fp8", LOOSE), bound=1.5
    ),
    "fsdp2 cp2": Crossing(2, (*fsdp2(context_parallel=2), *together(2))),
    "fsdp2 tp2": Crossing(2, (*fsdp2(tensor_parallel=2), *together(2))),
    "offloaded, fsdp2 of 2": Crossing(2, (*fsdp2(), *together(2), OFFLOAD)),
    "offloaded, megatron of 2": Crossing(2, (*megatron(), *together(2), OFFLOAD)),
}


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
    return {name: make_model(tmp_path_factory.mktemp(name) / "model", name, **options) for name in ("qwen3", MOE)}


@pytest.mark.parametrize("name", CROSSINGS)
def test_the_engine_has_what_was_trained(name: str, workplace: Workplace, models: dict[str, Path]) -> None:
    """Updates change each weight by a tenth of its size: probabilities of older weights would be far from the trainer's."""
    crossing = CROSSINGS[name]
    if crossing.devices > NUM_DEVICES:
        pytest.skip(f"needs {crossing.devices} CUDA devices, found {NUM_DEVICES}")
    run = workplace.train("grpo.toml", *COMMON, *crossing.options, f"model.path={models[crossing.model]}")
    errors = [record["token_mult_prob_error"] for record in read_metrics(run) if "token_mult_prob_error" in record]
    assert len(errors) > 1  # what was trained has been generated with
    assert all(error < crossing.bound for error in errors), errors
