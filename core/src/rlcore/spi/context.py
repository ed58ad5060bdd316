"""The contexts that the core builds backends with, `Backend(context, config)`; `[optimizer]`, `[schedule]` and `[lora]`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from attrs import field, frozen

from rlcore.schema.constraints import KNOWN_HOME, Constraint, Positive, Share, Text, above, at_least, at_least_below, between
from rlcore.spi.weights import Delta, DtypeName, Head

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer of the decoder's layers."""

_TARGETS = Constraint(
    f'that are not empty, each once, or "{ALL_LINEAR}" alone',
    lambda value: all(value) and len(set(value)) == len(value) > 0 and (len(value) == 1 or ALL_LINEAR not in value),
)


@frozen(kw_only=True)
class LoraSpec:
    """`[lora]`: low-rank adapters (arXiv:2106.09685) train, and the model's own weights stay as they are.

    A linear layer W [out, in] computes W x + alpha / rank · B A dropout(x), with A [rank, in] and B [out, rank] in float32. A
    begins uniform in ±1/√in, as PEFT's does, from the run's seed and the layer's name; B begins at zero.
    """

    rank: Positive = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, above(0)] = 32.0
    """The adapters' product is scaled by alpha / rank."""
    dropout: Annotated[float, at_least_below(0, 1)] = 0.0
    """Share of each adapter's inputs that a train step sets to zero; the others are divided by 1 - dropout."""
    targets: Annotated[tuple[str, ...], _TARGETS] = (ALL_LINEAR,)
    """The linear layers with an adapter, by the end of their names as in PEFT's target_modules, such as "q_proj" or
    "self_attn.q_proj". "all-linear" is every one in the decoder's layers: routers, fused experts and the head are none."""
    init_from: Annotated[Text, KNOWN_HOME] | None = None
    """A PEFT directory of the same rank, alpha and targets whose adapters the run begins with."""

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' product."""
        return self.alpha / self.rank


Beta: TypeAlias = Annotated[float, at_least_below(0, 1)]
_PATTERNS = Constraint("that are not empty, each once", lambda value: all(value) and len(set(value)) == len(value) > 0)


@frozen(kw_only=True)
class MuonSpec:
    """`[optimizer.muon]`: Muon's options, with the meaning of torch.optim.Muon's."""

    momentum: Beta = 0.95
    """Decay of the running mean of the gradient."""
    nesterov: bool = True
    """Mix the gradient into its running mean once more before the orthogonalization."""
    newton_schulz_steps: Annotated[int, between(1, 99)] = 5
    """Newton-Schulz iterations that orthogonalize an update, in bfloat16."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate for a matrix [A, B]: 0.2 · √max(A, B) (arXiv:2502.16982), or √max(1, A / B)."""


@frozen(kw_only=True)
class OptimizerGroup:
    """`[[optimizer.groups]]`: settings of some tensors in place of the table's."""

    parameters: Annotated[tuple[str, ...], _PATTERNS]
    """Shell patterns, in which * spans dots too, over names of tensors as exports have them (TensorSpec.name)."""
    name: Literal["adamw"] | None = None
    """"adamw" takes matrices out of Muon."""
    learning_rate: Annotated[float, above(0)] | None = None
    """Peak learning rate."""
    betas: tuple[Beta, Beta] | None = None
    """The same as the table's; of tensors that AdamW trains."""
    weight_decay: Annotated[float, at_least(0)] | None = None
    """The same as the table's: biases and norms are never decayed."""


@frozen(kw_only=True)
class OptimizerSpec:
    """`[optimizer]`: AdamW (arXiv:1711.05101) or Muon beside it, the same under every trainer."""

    name: Literal["adamw", "muon"] = "adamw"
    """"muon": train the weight matrices of the decoder's layers with Muon and all else with AdamW. A matrix is one that the
    Hugging Face checkpoint names, or one expert's of a stack that it names. Needs the capability `muon`."""
    learning_rate: Annotated[float, above(0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, above(0)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Decoupled decay of weight matrices; biases and norms are never decayed."""
    max_grad_norm: Annotated[float, at_least(0, "0.0 never scales gradients down.")] = 1.0
    """Gradients are scaled down to this global L2 norm; 0.0 never."""
    moments: Literal["float32", "8bit"] = "float32"
    """Storage of AdamW's two moments. "8bit": blocks of 256 of a row share a scale (arXiv:2110.02861); vectors, and tensors of
    less than 4096 elements, keep float32, as Muon's momentum does. Needs the capability `moments_8bit`."""
    muon: MuonSpec | None = None
    """Muon's options, where `name` is "muon"; None for its defaults."""
    groups: tuple[OptimizerGroup, ...] = ()
    """Each tensor takes the first group with a pattern that matches it. Needs the capability `optimizer_groups`."""


@frozen(kw_only=True)
class ScheduleSpec:
    """`[schedule]`: the learning rate over the run's optimizer steps."""

    warmup_steps: Annotated[int, at_least(0, "0 starts at the peak.")] = 0
    """Steps over which the learning rate rises linearly; the last of them is the first at the peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate's course from the end of the warm-up to the end of the run."""
    min_learning_rate_ratio: Share = 0.0
    """The end of a decay, as a share of the peak."""

    def share(self, step: int, num_steps: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0, in a run of `num_steps`, as a share of the peak.

        Steps 0 … warmup_steps-1 rise as (step+1)/warmup_steps. The decay starts at 1 in step warmup_steps and reaches
        min_learning_rate_ratio in step `num_steps`, where it stays.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        num_decay_steps = max(1, num_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / num_decay_steps)
        remaining = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_learning_rate_ratio + (1.0 - self.min_learning_rate_ratio) * remaining


@frozen(kw_only=True)
class ModelSpec:
    """The model of a run."""

    path: str
    """A local Hugging Face directory, or a name on the Hub."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; None for the default."""
    dtype: DtypeName = "float32"
    """Compute dtype. Trainers keep float32 master weights of what they train; in float64 all that they compute is float64."""
    trust_remote_code: bool = False


@frozen(kw_only=True)
class RankInfo:
    """One worker's place among its role's workers."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank within the node, which also numbers its device."""
    device: Literal["cpu", "cuda"] = "cpu"
    rendezvous: str | None = None
    """torch.distributed init method such as tcp://host:port; None when world_size is 1."""


@frozen(kw_only=True)
class TrainerContext:
    """The context that a trainer backend is built with."""

    model: ModelSpec
    rank_info: RankInfo
    seed: int
    num_train_steps: int
    """Optimizer steps that the run plans: what learning-rate schedules end at. Fewer are made where steps have no signal."""
    needs_reference: bool
    """True where get_logprobs(model="reference") will be called."""
    needs_policy: bool = True
    """True where anything but get_logprobs(model="reference"), set_residency and close will be called. False, beside
    `needs_reference`, is a reference on devices of its own: no other weights are held, `model` names what `reference` does, or
    the policy's model where that is None, and the version is 0 for ever. Needs the capability `reference_alone`."""
    max_sequence_length: int
    """Tokens of the longest sequence that any batch will hold."""
    reference: ModelSpec | None = None
    """The frozen model that get_logprobs(model="reference") asks, with a vocabulary of the policy's tokens; None for the policy
    as it was at the beginning. Needs the capability `reference_model`."""
    max_microbatch_tokens: int | None = None
    """Most tokens of one microbatch, unless a single sequence is longer; None where nothing bounds them."""
    optimizer: OptimizerSpec = field(factory=OptimizerSpec)
    """The optimizer that every train_step uses."""
    schedule: ScheduleSpec = field(factory=ScheduleSpec)
    """How the learning rate changes over the run."""
    lora: LoraSpec | None = None
    """The adapters, where adapters are all that trains: the model's weights are kept in the compute dtype alone, exports hold
    them with the adapters merged in, and the policy that `reference` stands for is the model without them, or with those that
    `lora.init_from` names, which checkpoints then hold too. Needs the capability `lora`."""
    head: Head = "tokens"
    """The model's output layer. "value": in place of the vocabulary's head one linear output a token, the weight `score.weight`
    float32 [1, hidden] without a bias, as in transformers' *ForSequenceClassification with num_labels = 1, which is what
    save_state(kind="hf") writes. It begins with what the model's directory holds under that name, or at zero. Needs the
    capability `value_head`."""

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of train_step at TrainStepRequest.schedule_step `step`."""
        return self.optimizer.learning_rate * self.schedule.share(step, self.num_train_steps)


@frozen(kw_only=True)
class GeneratorContext:
    """The context that a generator backend is built with."""

    model: ModelSpec
    rank_info: RankInfo
    seed: int
    max_sequence_length: int
    """Prompt and response together, in tokens."""
    channel: str | None = "in_process"
    """How weights will come, by the name of an installed channel (`find_channel`). Where the channel's reach is "process", what
    holds the weights lives in the process that built the backend, beside the trainer. None where none will come: the generator
    begins with the weights that `model` names, as version 0. Needs the capability `own_weights`."""
    devices: tuple[int, ...] | None = None
    """CUDA devices to generate on, counted among those that this process sees: those that only generate, or the devices of
    several trainer ranks that it spans. None where it shares that of `rank_info.local_rank` alone, or its section of the recipe
    says."""
    log_directory: Path | None = None
    """A folder for the output of processes that the backend starts, made by whoever writes there; None where they have to find
    one themselves."""
    routed_experts: bool = False
    """True where requests may ask for GenerateResult.routed_experts."""
    lora: LoraSpec | None = None
    """The adapters, where refits bring them unmerged (ExportWeightsRequest.adapters): the first of them, and each that follows
    where no weights count, both; the others adapters alone, beside which the weights stay. What is sampled is the model with
    its adapters. Needs the capability `adapter_refit`."""
    delta: Delta = "off"
    """RefitRequest.delta or, of a sharded channel, ExportWeightsRequest.delta, as it will be."""
    max_adapters: int = 1
    """Most adapters of the form `lora` that the generator holds at once. More than one need the capability `many_adapters`."""


@frozen(kw_only=True)
class AlgorithmContext:
    """The facts of a run that an algorithm may rely on."""

    seed: int
    samples_per_prompt: int
    minibatches_per_step: int
    temperature: float
    generation_logprobs_exact: bool
    """The generator's log-probabilities equal the trainer's own to rounding (same numerics, no truncated sampling)."""
    max_prompt_tokens: int = 512
    """rollout.max_prompt_tokens: most tokens of a prompt."""
    max_response_tokens: int = 512
    """rollout.max_response_tokens: most tokens after the prompt; of agents, most of one answer."""
    model: ModelSpec | None = None
    """The policy's model, of which an algorithm may read the tokenizer; None outside a run."""


@frozen(kw_only=True)
class EnvironmentContext:
    """The context that an environment is built with."""

    seed: int
    reward_functions: tuple[Callable[..., Any], ...] = ()
    """Functions that a program hands over, as `rlcore.train(recipe, reward=f)` does, in place of those that the section names.
    Needs the capability `reward_functions`."""


@frozen(kw_only=True)
class CheckContext:
    """The context that a provider's `check` receives. It runs in the driver before anything is allocated, and must not allocate
    either."""

    model: ModelSpec
    device: Literal["cpu", "cuda"]
    world_size: int
    max_sequence_length: int
    max_microbatch_tokens: int | None = None
    """TrainerContext.max_microbatch_tokens, as it will be."""
    needs_reference: bool = False
    """TrainerContext.needs_reference, as it will be."""
    needs_policy: bool = True
    """TrainerContext.needs_policy, as it will be. A trainer's check is called once more where the reference has devices of its
    own, with their number as `world_size`."""
    lora: LoraSpec | None = None
    """TrainerContext.lora, as it will be."""
    generator_lora: LoraSpec | None = None
    """GeneratorContext.lora, as it will be."""
    reference: ModelSpec | None = None
    """TrainerContext.reference, as it will be."""
    head: Head = "tokens"
    """TrainerContext.head, as it will be."""
    critic: ModelSpec | None = None
    """The model of the critic, where a policy and a critic will be built side by side in every rank, by the same plugin and
    with the same options; the trainer's check is called for each of the two."""
    channel: str | None = None
    """How weights will travel; None where nothing generates."""
    delta: Delta = "off"
    """RefitRequest.delta or, of a sharded channel, ExportWeightsRequest.delta, as it will be."""
    generator_devices: tuple[int, ...] | None = None
    """GeneratorContext.devices, as they will be on a node's first rank."""
    planned_options: frozenset[str] = frozenset()
    """Keys of the generator's section that said "auto" and hold what its plan says (Provider.planned_options)."""
    replays_routing: bool = False
    """True where the generator's choice of experts will be reported and replayed."""
    corrects_staleness: bool = True
    """AlgorithmNeeds.corrects_staleness of the algorithm that trains on what is generated; true where none does."""
    max_turns: int = 1
    """Most turns of an episode."""
    environment_timeout_s: float | None = None
    """Most seconds for one call of the environment; None where there is none."""
    optimizer: OptimizerSpec | None = None
    """TrainerContext.optimizer, as it will be; like the next two None where nothing is known of a training."""
    schedule: ScheduleSpec | None = None
    """TrainerContext.schedule, as it will be. A trainer whose options replace it says so by a Note with the path `schedule`:
    the core's own notes of a schedule that the run is too short for are left out then."""
    num_train_steps: int | None = None
    """TrainerContext.num_train_steps, as it will be."""
