"""generator.vllm.gpu_memory_utilization = "auto": from a recipe, by the plan of the trainer that it has, to vLLM's argument.

No GPU is here: nvidia-smi's answer and the build of vLLM are stood in for. Shapes and figures are those of measured runs.
"""

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tomli
from attrs import evolve, frozen
from trainer_plans import DEVICE

from rlcore.run.plan.prepare import prepare
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, LoraSpec, PlanContext, RankInfo
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.plan import plan as plan_fsdp2
from rlcore_megatron.layouts.plan import plan as plan_megatron
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_plan import planned_options
from rlcore_plan.device_room import generator_room
from rlcore_plan.lengths import response_lengths
from rlcore_torchkit.architectures.architecture import Architecture, tensor_shapes
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.registry import find_architecture
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.checks import check
from rlcore_vllm.checks.plan import plan as plan_vllm
from rlcore_vllm.setup import settings
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import engine_settings, with_devices

from .system_support import DIGITS, Workplace, read_metrics  # type: ignore[import-not-found]

GIB = 2**30
H100, H200 = int(79.6 * GIB), int(140.4 * GIB)
B8 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
B1_5 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
ONE_OF_ALL = {f"{name}_parallel": 1 for name in ("tensor", "context", "pipeline", "expert")}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
GRADIENTS = {"grad_reduce_in_fp32": False}


def widen(model: Path) -> None:
    """Give a small model the sizes of B1_5, and a file of weights with a header of such sizes and nothing behind it."""
    content = json.loads((model / "config.json").read_text())
    content |= {**B1_5, "vocab_size": content["vocab_size"]}
    content.pop("layer_types", None)  # of the small model's number of layers
    (model / "config.json").write_text(json.dumps(content))
    family, dims = find_architecture(content, str(model)), ModelDims.of(content)
    assert isinstance(family, Architecture)
    assert dims is not None
    shapes = tensor_shapes(family, dims)
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + 4 * prod(shape)]}
        end += 4 * prod(shape)
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@frozen(kw_only=True)
class Row:
    """A run of docs/benchmarks.md (the headline work), with what its devices had in use while it generated."""

    model: dict[str, Any] = B8
    memory: int = H200
    gpus: int
    trainer: Fsdp2Config | MegatronConfig
    lora: LoraSpec | None = None
    microbatch: int = 6144
    longest: int = 3946
    offload: Any = "none"
    sleeps: bool = True
    by_hand: float
    """gpu_memory_utilization of the measured run."""
    in_use: float
    """GiB in use on a device at most, while it generated."""
    auto: float

    @property
    def context(self) -> PlanContext:
        return PlanContext(
            model=self.model,
            dtype="bfloat16",
            device=evolve(DEVICE, memory_bytes=self.memory),
            world_size=self.gpus,
            local_size=self.gpus,
            is_shared=True,
            free_bytes=self.memory,
            num_sequences=256 * self.gpus,
            prompt_tokens=150.0,
            samples_per_prompt=32,
            response_lengths=response_lengths(self.longest / 4, self.longest),
            max_sequence_length=150 + self.longest,
            max_microbatch_tokens=self.microbatch,
            updates=4,
            policy_passes=0.75,
            reference_passes=1.0,
            reference=self.model,
            lora=self.lora,
            as_configured=True,
        )


ROWS = {
    "8B, adapters, one H100": Row(
        memory=H100, gpus=1, trainer=Fsdp2Config(), lora=LoraSpec(rank=32, alpha=64), by_hand=0.6, in_use=69.2, auto=0.69
    ),
    "8B, adapters, one H100, an engine that stays awake": Row(
        memory=H100,
        gpus=1,
        trainer=Fsdp2Config(),
        lora=LoraSpec(rank=32, alpha=64),
        microbatch=4096,
        longest=500,
        sleeps=False,
        by_hand=0.42,
        in_use=74.7,
        auto=0.38,
    ),
    "8B in 8 bits, nothing offloaded, one H200": Row(
        gpus=1,
        trainer=MegatronConfig(**ONE_OF_ALL, fp8=True, ddp=GRADIENTS, optimizer=NARROW),
        microbatch=4096,
        by_hand=0.22,
        in_use=119.9,
        auto=0.29,
    ),
    "8B, state offloaded, two H200": Row(
        gpus=2,
        trainer=MegatronConfig(**ONE_OF_ALL, ddp=GRADIENTS),
        offload="state",
        by_hand=0.6,
        in_use=122.0,
        auto=0.70,
    ),
    "8B, four H200": Row(gpus=4, trainer=Fsdp2Config(), microbatch=8192, by_hand=0.6, in_use=115.0, auto=0.71),
    "1.5B, two H200": Row(model=B1_5, gpus=2, trainer=Fsdp2Config(), microbatch=8192, by_hand=0.6, in_use=98.8, auto=0.84),
}


@pytest.mark.parametrize("name", ROWS)
def test_beside_what_measured_runs_had_in_use_it_fits(name: str) -> None:
    """Everything but the engine's share, as it was measured, and the planned share leave 2 GiB of the device."""
    row = ROWS[name]
    plan: Any = plan_megatron if isinstance(row.trainer, MegatronConfig) else plan_fsdp2
    (trainer,) = plan(row.context, row.trainer)
    room = generator_room(row.memory, trainer, row.offload, sleeps=row.sleeps)
    (engine,) = plan_vllm(evolve(row.context, free_bytes=room), VllmConfig())
    share = float(engine.options["gpu_memory_utilization"])
    beside = row.in_use - row.by_hand * row.memory / GIB
    assert beside + share * row.memory / GIB < row.memory / GIB - 2
    assert share == row.auto


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunPlan]:
    """A recipe of a model with the sizes of 1.5B, prepared for one H100."""
    model = make_model(tmp_path / "model", "qwen2", max_length=2048)
    widen(model)
    for module in (planned_options, check):
        monkeypatch.setattr(module, "device_memories", lambda: [H100])
    monkeypatch.setattr(check, "meant_for", lambda: {"cpu", "cuda"})
    recipe = {
        "model": {"path": str(model)},
        "algorithm": {"name": "grpo"},
        "environment": {"name": "arithmetic"},
        "trainer": {"name": "fsdp2"},
        "generator": {"name": "vllm"},
        "run": {"device": "cuda"},
    }
    return lambda *overrides: prepare(recipe, overrides)


def argument(plan: RunPlan) -> float:
    """What vLLM would be given."""
    context = plan.generator_context(RankInfo(device="cuda"), None)
    return engine_settings(context, with_devices(plan.config("generator"), context.devices)).arguments["gpu_memory_utilization"]


def test_the_recipes_auto_is_vllms_argument(planned: Callable[..., RunPlan]) -> None:
    plan = planned()
    share = plan.config("generator").gpu_memory_utilization
    (note,) = [one for one in plan.notes if one.startswith("generator.vllm.gpu_memory_utilization")]
    assert f'"auto" is {share}: of 79.6 GiB the trainer keeps' in note
    assert "KV cache" in note
    assert argument(plan) == share
    assert argument(planned("generator.vllm.replicas=2")) == share / 2
    assert argument(planned("offload.trainer=all")) > share
    assert argument(planned("generator.vllm.gpu_memory_utilization=0.3")) == 0.3
    assert f"gpu_memory_utilization = {share}" in plan.resolved


SEPARATE = ("cluster.gpus_per_node=2", "cluster.placement=separate", "cluster.generator_gpus_per_node=1")


def test_copies_of_weights_that_no_plan_knew_of_are_left_room_by_the_process_that_starts_engines(
    planned: Callable[..., RunPlan], monkeypatch
) -> None:
    """The driver is on a machine without a GPU. What is planned where it sees them is the same."""
    monkeypatch.setattr(planned_options, "device_memories", lambda: [H100] * 2)
    monkeypatch.setattr(check, "device_memories", lambda: [H100] * 2)
    as_planned = planned(*SEPARATE, 'refit.delta="device"').config("generator").gpu_memory_utilization
    for module in (planned_options, check, settings):
        monkeypatch.setattr(module, "device_memories", lambda: None)
    plan, without = planned(*SEPARATE, 'refit.delta="device"'), planned(*SEPARATE)
    notes = "\n".join(one for one in plan.notes if one.startswith("generator.vllm.gpu_memory_utilization"))
    assert "nvidia-smi shows the driver no such device" in notes
    assert '"auto" is 0.5 of a device' in notes
    assert "which share they have is not known here" in notes
    assert (argument(plan), argument(without)) == (0.5, 0.92)
    monkeypatch.setattr(settings, "device_memories", lambda: [H100] * 2)
    assert argument(plan) == pytest.approx(as_planned, abs=0.011)
    assert 0.85 < as_planned < 0.92
    assert argument(without) == 0.92


def test_a_reward_model_on_the_device_is_left_its_room(planned: Callable[..., RunPlan], tmp_path: Path, monkeypatch) -> None:
    """Beside the trainer; not on devices that are the engines' own."""
    path = make_model(tmp_path / "judge", "qwen2", head="value", max_length=2048)
    widen(path)
    judged = ("environment.name=reward_model", f"environment.reward_model.path={path}")
    on_device = (*judged, "environment.reward_model.device=cuda")
    without, plan = planned(*judged), planned(*on_device)
    # 1.31e9 weights in float32, 1 GiB of the process, and a pass over 16 answers.
    taken = argument(without) - argument(plan)
    assert 6.0 / 79.6 < taken < 9.0 / 79.6
    (note,) = [one for one in plan.notes if one.startswith("generator.vllm.gpu_memory_utilization")]
    assert "the environment reward_model has " in note
    assert argument(planned(*on_device, "environment.reward_model.dtype=bfloat16")) > argument(plan)
    awake = "offload.generator_sleep_mode=false"
    assert argument(planned(*judged, awake)) - argument(planned(*on_device, awake)) == pytest.approx(taken, abs=0.011)
    for module in (planned_options, check):
        monkeypatch.setattr(module, "device_memories", lambda: [H100] * 2)
    assert argument(planned(*on_device, *SEPARATE)) == argument(planned(*judged, *SEPARATE)) == 0.92


def test_what_the_trainer_leaves_too_little_of_is_refused(planned: Callable[..., RunPlan], monkeypatch) -> None:
    """With what the trainer can do about it: no larger share would fit."""
    for module in (planned_options, check):
        monkeypatch.setattr(module, "device_memories", lambda: [19 * GIB])
    with pytest.raises(ConfigError) as caught:
        planned()
    (problem,) = [one for one in caught.value.problems if "gpu_memory_utilization" in one.path]
    assert problem.found.startswith('"auto", which is 0.')
    assert "offload.trainer" in problem.remedy
    assert "of 19.0 GiB the trainer keeps" in problem.remedy, "what the number came from"


def test_on_a_cpu_a_run_takes_auto_and_no_share(workplace: Workplace, tmp_path: Path) -> None:
    """vLLM itself: its cache is cpu_kv_cache_gib; a run that goes on finds the recipe that it began with."""
    model = make_model(tmp_path / "wide", "qwen3", alphabet=DIGITS, max_length=64, hidden_size=64, num_heads=2)
    options = (
        f"model.path={model}",
        "generator.name=vllm",
        "generator.vllm.cpu_kv_cache_gib=0.1",
        'generator.vllm.gpu_memory_utilization="auto"',
    )
    run = workplace.train("grpo.toml", *options, "run.num_steps=2", "checkpoint.every_n_steps=1")
    recorded = tomli.loads((run / "recipe.toml").read_text())["generator"]["vllm"]
    assert (recorded["gpu_memory_utilization"], recorded["cpu_kv_cache_gib"]) == ("auto", 0.1)
    assert len(read_metrics(run)) >= 2
    result = workplace.rlcore("train", "grpo.toml", *options, "run.num_steps=3", "checkpoint.every_n_steps=1", "--resume")
    assert result.exit_code == 0, result.stderr
    assert "gpu_memory_utilization" not in result.stderr + result.stdout


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("trainer.fsdp2.tensor_parallel=4", "trainer.fsdp2"),
        ("trainer.fsdp2.context_parallel=3", "trainer.fsdp2"),
        ("generator.vllm.devices=[]", "generator.vllm.devices"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_as_beside_a_number(planned: Callable[..., RunPlan], option: str, path: str) -> None:
    """Though nothing can be planned for it."""
    with pytest.raises(ConfigError) as caught:
        planned(option, 'refit.delta="device"')
    assert path in [problem.path for problem in caught.value.problems]
