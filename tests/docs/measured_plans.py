"""Layouts that were measured, with what `rlcore plan` predicts of the very same ones; plan_document.py prints both."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from rlcore.spi import OptimizerSpec, PlanContext, PlanOption
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.plan import plan as plan_fsdp2
from rlcore_megatron.layouts.plan import plan as plan_megatron
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_plan.devices import parse_devices
from rlcore_plan.layouts import candidates
from rlcore_plan.lengths import response_lengths
from rlcore_plan.work import Work
from rlcore_vllm.checks.plan import plan as plan_vllm
from rlcore_vllm.setup.config import VllmConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from model_shapes import SHAPES

GB = 1e9
NO_SIZES = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), 1)
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
BFLOAT16_GRADIENTS = {"grad_reduce_in_fp32": False}


@frozen(kw_only=True)
class Measured:
    """A configuration that was measured, and what of it."""

    name: str
    source: str
    """The document and section that has the figures."""
    shape: str
    num_layers: int | None = None
    """None where it has all of the shape's."""
    gpus: str
    config: MegatronConfig | Fsdp2Config
    engine: VllmConfig | None = None
    """None where a trainer was measured alone."""
    num_sequences: int
    mean: float | None = None
    """The mean length of answers; None where all have `limit`."""
    limit: int
    prompt: float = 0.0
    samples: int = 1
    microbatch: int = 8192
    updates: int = 1
    has_logprobs: bool = False
    """Log-probabilities of a reference, and of the policy for later updates."""
    optimizer: OptimizerSpec = OptimizerSpec()
    policy_by_trainer: bool = True
    """Whether the policy's are the trainer's; else they are the generator's, which has them."""
    max_staleness: int = 0
    step_s: float
    """Of an update, or of a whole step where an engine generates."""
    peak_gb: float | None = None
    """The trainer's, as torch's allocator counted it, in 10^9 bytes; None where only the device's whole use is known."""

    @property
    def context(self) -> PlanContext:
        """The step's work."""
        devices = parse_devices(self.gpus, None)
        model = SHAPES[self.shape]
        if self.num_layers is not None:
            model = {**model, "num_hidden_layers": self.num_layers}
        return PlanContext(
            model=model,
            dtype="bfloat16",
            device=devices.spec,
            world_size=devices.number,
            local_size=devices.per_node,
            is_shared=True,
            free_bytes=devices.spec.memory_bytes,
            num_sequences=self.num_sequences,
            prompt_tokens=self.prompt,
            samples_per_prompt=self.samples,
            response_lengths=response_lengths(self.limit if self.mean is None else self.mean, self.limit),
            max_sequence_length=int(self.prompt) + self.limit,
            max_microbatch_tokens=self.microbatch,
            updates=self.updates,
            optimizer=self.optimizer,
            policy_passes=(self.updates - 1) / self.updates if self.has_logprobs and self.policy_by_trainer else 0.0,
            reference_passes=float(self.has_logprobs),
            reference=model if self.has_logprobs else None,
        )

    def predicted(self) -> tuple[float, float]:
        """Seconds and 10^9 bytes of the very layout that was measured."""
        context = self.context
        planner = plan_megatron if isinstance(self.config, MegatronConfig) else plan_fsdp2
        unchanged = [option for option in planner(context, self.config) if _is_as_given(option)]  # type: ignore[operator]
        trainer = unchanged[0]
        if self.engine is None:
            return trainer.seconds["training"], sum(trainer.memory.values()) / GB
        engine = self.engine
        work = Work(context=context, generates=True, offload="none", max_staleness=self.max_staleness, assumptions=())
        made = candidates(
            work,
            parse_devices(self.gpus, None),
            {"trainer": lambda _: [trainer]},
            {"vllm": lambda other: [one for one in plan_vllm(other, engine) if one.num_devices == engine.tensor_parallel]},
        )
        colocated = [one for one in made if "cluster.placement" not in dict(one.overrides)]
        return min(one.total for one in colocated), sum(trainer.memory.values()) / GB


def _is_as_given(option: PlanOption) -> bool:
    """Whether a layout is that of the section: "auto" and defaults are alternatives to look at, and 1 is none."""
    return all(value in (False, 1) for value in option.options.values())


HEADLINE_SECTION = "benchmarks.md#the-headline-work-on-eight-gpus-benchmarksheadlinepy"
HEADLINE: Mapping[str, Any] = {"limit": 3946, "prompt": 150.0, "samples": 32, "updates": 4, "has_logprobs": True}
IN_8_BITS: Mapping[str, Any] = {
    **HEADLINE,
    "shape": "8b",
    "gpus": "1xH200",
    "config": MegatronConfig(**NO_SIZES, fp8=True, optimizer=NARROW, ddp=BFLOAT16_GRADIENTS),
    "engine": VllmConfig(quantization="fp8", kv_cache_dtype="fp8"),
    "num_sequences": 256,
    "policy_by_trainer": False,
    "source": HEADLINE_SECTION,
}
ONE_GPU: Mapping[str, Any] = {
    "source": HEADLINE_SECTION,
    "shape": "8b",
    "gpus": "1xH200",
    "config": MegatronConfig(**NO_SIZES, recompute="full", ddp=BFLOAT16_GRADIENTS),
    "optimizer": OptimizerSpec(moments="8bit"),
}
OF_EXPERTS: Mapping[str, Any] = {
    **HEADLINE,
    "shape": "30b-a3b",
    "gpus": "4xH200",
    "config": MegatronConfig(**{**NO_SIZES, "expert_parallel": 4}, recompute="full", optimizer=NARROW, ddp=BFLOAT16_GRADIENTS),
    "engine": VllmConfig(tensor_parallel=4),
    "num_sequences": 1024,
    "source": HEADLINE_SECTION,
}
UPDATE: Mapping[str, Any] = {"shape": "1.5b", "gpus": "1xH100", "num_sequences": 64, "limit": 512}
SIX_LAYERS: Mapping[str, Any] = {"shape": "8b", "num_layers": 6, "gpus": "1xH200", "num_sequences": 64, "limit": 512}
UPDATE_SECTION = "benchmarks.md#a-training-step-on-a-gpu-benchmarkstrain_steppy"
LONG_SECTION = "benchmarks.md#long-sequences-benchmarkslong_contextpy"


def _long(trainer: str, length: int, step_s: float, peak_gb: float, **sizes: int) -> Measured:
    if trainer == "fsdp2":
        config: MegatronConfig | Fsdp2Config = Fsdp2Config(activation_checkpointing=True, **sizes)
    else:
        config = MegatronConfig(**{**NO_SIZES, **sizes}, recompute="full")
    layout = " ".join(f"{name.split('_')[0]} {size}" for name, size in sizes.items())
    return Measured(
        name=f"one sequence of {length:,}, 8B, `{trainer}`, {layout}, recomputed",
        source=LONG_SECTION,
        shape="8b",
        gpus="2xH200",
        config=config,
        num_sequences=1,
        limit=length,
        microbatch=length,
        step_s=step_s,
        peak_gb=peak_gb,
    )


MEASURED = (
    Measured(
        name="GRPO step, 8B, `megatron`",
        source=HEADLINE_SECTION,
        shape="8b",
        gpus="2xH200",
        config=MegatronConfig(**NO_SIZES, ddp=BFLOAT16_GRADIENTS),
        engine=VllmConfig(),
        num_sequences=512,
        mean=827,
        microbatch=6144,
        step_s=63.6,
        **HEADLINE,
    ),
    Measured(
        name="GRPO step, 8B, `megatron`",
        source=HEADLINE_SECTION,
        shape="8b",
        gpus="4xH200",
        config=MegatronConfig(**NO_SIZES, ddp=BFLOAT16_GRADIENTS),
        engine=VllmConfig(),
        num_sequences=1024,
        mean=779,
        step_s=61.9,
        peak_gb=112.5,
        **HEADLINE,
    ),
    Measured(
        name="GRPO step, 8B, `fsdp2`",
        source=HEADLINE_SECTION,
        shape="8b",
        gpus="4xH200",
        config=Fsdp2Config(),
        engine=VllmConfig(),
        num_sequences=1024,
        mean=779,
        step_s=68.5,
        **HEADLINE,
    ),
    Measured(
        name="GRPO step, 30B-A3B, `megatron`, expert 4, recomputed",
        mean=779,
        microbatch=12288,
        step_s=116.0,
        peak_gb=109.7,
        **OF_EXPERTS,
    ),
    Measured(
        name="GRPO step, 30B-A3B, `megatron`, expert 4, recomputed, staleness 1",
        mean=823,
        microbatch=24576,
        max_staleness=1,
        policy_by_trainer=False,
        step_s=77.7,
        **OF_EXPERTS,
    ),
    Measured(name="GRPO step, 8B in 8 bits, `megatron`", mean=821, microbatch=6144, step_s=42.6, **IN_8_BITS),
    Measured(
        name="GRPO step, 8B in 8 bits, `megatron`, staleness 1, microbatches of 4,096",
        mean=847,
        microbatch=4096,
        max_staleness=1,
        step_s=36.0,
        **IN_8_BITS,
    ),
    Measured(
        name="GRPO step, 8B, `megatron`, moments in 8 bits, recomputed, engine in 8 bits",
        engine=VllmConfig(quantization="fp8", kv_cache_dtype="fp8"),
        num_sequences=256,
        mean=809,
        microbatch=4096,
        step_s=50.2,
        **{**HEADLINE, "has_logprobs": False},
        **ONE_GPU,
    ),
    Measured(
        name="GRPO step of two sequences of 131,072, 8B, `megatron`, moments in 8 bits, recomputed",
        engine=VllmConfig(),
        num_sequences=2,
        samples=2,
        prompt=126976.0,
        mean=2123,
        limit=4096,
        microbatch=131072,
        step_s=166.2,
        **ONE_GPU,
    ),
    Measured(
        name="GRPO step, 1.5B, `fsdp2`, two GPUs",
        source=HEADLINE_SECTION,
        shape="1.5b",
        gpus="2xH200",
        config=Fsdp2Config(),
        engine=VllmConfig(),
        num_sequences=512,
        mean=779,
        step_s=22.98,
        **HEADLINE,
    ),
    Measured(
        name="GRPO step, 1.5B, `fsdp2`, answers of 512",
        source="benchmarks.md#a-whole-grpo-step-on-one-gpu-benchmarksgrpo_steppy",
        shape="1.5b",
        gpus="1xH200",
        config=Fsdp2Config(),
        engine=VllmConfig(),
        num_sequences=512,
        limit=512,
        prompt=128.0,
        samples=8,
        step_s=12.2,
    ),
    Measured(
        name="update, 1.5B, `megatron`",
        source=UPDATE_SECTION,
        config=MegatronConfig(**NO_SIZES),
        step_s=0.710,
        peak_gb=46.6,
        **UPDATE,
    ),
    Measured(
        name="update, 1.5B, `megatron`, recomputed",
        source=UPDATE_SECTION,
        config=MegatronConfig(**NO_SIZES, recompute="full"),
        step_s=1.154,
        peak_gb=30.6,
        **UPDATE,
    ),
    Measured(
        name="update, 1.5B in 8 bits, `megatron`",
        source=UPDATE_SECTION,
        config=MegatronConfig(**NO_SIZES, fp8=True),
        step_s=0.917,
        peak_gb=46.9,
        **UPDATE,
    ),
    Measured(
        name="update, six layers of 8B, `megatron`",
        source=UPDATE_SECTION,
        config=MegatronConfig(**NO_SIZES),
        step_s=0.723,
        peak_gb=53.2,
        **SIX_LAYERS,
    ),
    Measured(
        name="update, six layers of 8B in 8 bits, `megatron`",
        source=UPDATE_SECTION,
        config=MegatronConfig(**NO_SIZES, fp8=True),
        step_s=0.567,
        peak_gb=54.9,
        **SIX_LAYERS,
    ),
    Measured(name="update, 1.5B, `fsdp2`", source=UPDATE_SECTION, config=Fsdp2Config(), step_s=0.795, peak_gb=50.8, **UPDATE),
    Measured(
        name="update, 1.5B, `fsdp2`, recomputed",
        source=UPDATE_SECTION,
        config=Fsdp2Config(activation_checkpointing=True),
        step_s=1.065,
        peak_gb=30.5,
        **UPDATE,
    ),
    _long("megatron", 16384, 1.339, 102.4, context_parallel=2),
    _long("fsdp2", 16384, 1.541, 69.6, context_parallel=2),
    _long("megatron", 65536, 8.609, 112.5, context_parallel=2),
    _long("megatron", 65536, 8.619, 87.9, tensor_parallel=2),
    _long("fsdp2", 65536, 11.505, 74.6, context_parallel=2),
)
