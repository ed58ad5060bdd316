"""The questions of `rlcore plan` to trainers and generators, and their answers: the layouts that they could have, estimated."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from rlcore.spi.context import LoraSpec, OptimizerSpec
from rlcore.spi.weights import DtypeName

PLANNER_GROUP = "rlcore.planners"
"""Entry-point group of the function that replaces "auto" in a generator's section (Provider.planned_options). Before a run on
GPUs it is called as function(plan, keys) -> plan, with the RunPlan of `rlcore.run.plan.run_plan` and keys of the section."""


@frozen(kw_only=True)
class DeviceSpec:
    """One device of a kind, and how it is joined to others. Rates are of one device and in one direction."""

    name: str
    memory_bytes: int
    """The memory that the driver reports."""
    flops: float
    """Dense bfloat16 products, FLOP/s."""
    bandwidth: float
    """Its memory's bytes/s."""
    link: float
    """Bytes/s to the devices of the same machine."""
    network: float
    """Bytes/s to those of other machines."""
    host: float
    """Bytes/s to the memory of the host."""
    devices_per_node: int
    """Devices of one machine."""
    float8_flops: float | None = None
    """Dense products of 8-bit floats, FLOP/s; None where none are known."""


@frozen(kw_only=True)
class PlanContext:
    """A step's work, and the devices that one role has for it."""

    model: Mapping[str, Any]
    """The content of config.json."""
    dtype: DtypeName
    device: DeviceSpec
    world_size: int
    """Devices of this role."""
    local_size: int
    """Devices of one machine among these."""
    is_shared: bool
    """True where trainer and generator take turns on the devices."""
    free_bytes: int
    """Bytes of a device that this role can fill."""
    num_sequences: int
    """Sequences of a step."""
    prompt_tokens: float
    """The mean length of prompts."""
    samples_per_prompt: int
    response_lengths: tuple[float, ...]
    """Tokens behind the prompt, as quantiles of equal weight, from the shortest to the longest."""
    max_sequence_length: int
    max_microbatch_tokens: int
    """Most tokens of one microbatch, unless one sequence alone is longer."""
    updates: int
    """Optimizer steps that the sequences are divided into."""
    policy_passes: float
    """How often the policy's log-probabilities of all sequences are computed outside of training; a share for some of them."""
    reference_passes: float
    """How often log-probabilities are computed by a frozen reference that the trainer's devices hold."""
    reference: Mapping[str, Any] | None = None
    """The content of the reference's config.json; None where there is none on these devices."""
    lora: LoraSpec | None = None
    optimizer: OptimizerSpec = field(factory=OptimizerSpec)
    delta_copies: Literal["none", "parts", "whole"] = "none"
    """The copies that a delta refit keeps on devices. "parts": each rank of the trainer keeps those that it sends. "whole": the
    process that hosts a generator keeps all tensors. With both, each rank of the generator keeps all tensors too."""
    as_configured: bool = False
    """True where one layout alone is asked for: the one that a run would have with this section, in which nothing is varied and
    "auto" is what a run takes for it. Asked before a run whose generator has `Provider.planned_options`."""
    generation_turns: tuple[float, ...] = ()
    """For generation that runs ahead, the tokens that a sample under way gets in the generation of each of N steps, which
    follow each other over and over and together are the longest answer. The samples that begin with a step have all ended N - 1
    steps later. Empty where each step waits for all that begin with it."""


@frozen(kw_only=True)
class PlanOption:
    """One layout of a trainer, or of one generator, whether it fits or not."""

    options: Mapping[str, bool | int | float | str] = field(factory=dict)
    """Keys of the plugin's own section of a recipe that make this layout, where they differ from what the section says."""
    num_devices: int = 1
    """Devices that one generator spans; 1 for trainers."""
    memory: Mapping[str, int]
    """Bytes of the fullest device at this role's peak, by part."""
    idle: Mapping[str, int] = field(factory=dict)
    """Bytes that stay on a device while the other role works there, by offload.trainer; a generator's is "none"."""
    seconds: Mapping[str, float]
    """Seconds of each phase of a step: "generation", "log-probabilities", "training", "refit"."""
    assumptions: tuple[str, ...] = ()
    """The assumptions of the figures, a sentence each."""
