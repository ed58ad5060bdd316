"""Estimates the memory of a layout on a GPU from the model's sizes, to choose layouts by.

Parameters as in Narayanan et al. (arXiv:2104.04473), activations as in Korthikanti et al. (arXiv:2205.05198) but with gated
MLPs and fused attention, which keeps no scores but where there are sinks or caps. Norms and biases, a thousandth of the whole,
are left out.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from attrs import evolve, field, frozen

from rlcore.spi import LoraSpec, OptimizerSpec, Problem
from rlcore.spi.weights import ITEM_BYTES
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.families.models import find_family
from rlcore_megatron.layouts.float8_share import narrow_dims
from rlcore_megatron.layouts.optimizer_memory import MOMENT_BYTES, STEP_ELEMENTS, state_bytes, step_bytes
from rlcore_megatron.layouts.stages import layer_numbers_of_stages, layers_of_stages
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.requirements import uses_transformer_engine
from rlcore_torchkit.adapters.lora_targets import adapted_layers
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.distributed.format_bytes import gib
from rlcore_torchkit.trainer.step_costs import attention_parameters

GRADIENT_BYTES = 4
"""Gradients are accumulated in float32 unless `ddp.grad_reduce_in_fp32` is false."""
USABLE = 0.88
"""Share of a device's memory that weights and activations can fill; the rest is CUDA's, NCCL's, and what fragments."""
LOGITS_ELEMENTS = 3 * 2**26
"""Logits that one chunk of `rlcore_torchkit` holds on CUDA."""
LOGITS_BYTES = 8
"""A chunk's logits in float32, and their gradient in the compute dtype beside what a product needs."""
SLOPE_BYTES = 4
"""The derivatives of a chunk's soft caps, in float32."""
UNFUSED = 1.6
"""Without TransformerEngine, norms, rotary embeddings and gates keep what fused kernels do not."""


@frozen(kw_only=True)
class Workload:
    """The model, ranks and devices that a layout is chosen for."""

    world_size: int
    model: Mapping[str, Any]
    """The content of config.json."""
    device: Literal["cpu", "cuda"]
    max_sequence_length: int
    max_microbatch_tokens: int | None = None
    """Tokens of one microbatch, unless one sequence alone is longer; None is as many as the longest sequence has."""
    memory_bytes: int | None = None
    """All memory of the smallest device; None where it is not known: "auto" then takes the smallest sizes that divide."""
    local_size: int = 8
    """Devices of one machine, which tensor ranks share."""
    dtype: str = "bfloat16"
    reference: Mapping[str, Any] | None = None
    """The content of the config.json of a frozen model that is held too."""
    lora: LoraSpec | None = None
    """The adapters that train in place of the model's weights."""
    optimizer: OptimizerSpec = field(factory=OptimizerSpec)
    trains: bool = True
    """True where there are gradients and an optimizer; False for a frozen model by itself."""

    @cached_property
    def family(self) -> MegatronFamily | Problem:
        """The model's family; a problem where none is known."""
        return find_family(self.model, "")

    @cached_property
    def reference_family(self) -> MegatronFamily | Problem | None:
        """The reference's family; a problem where none is known, and None without a reference."""
        return None if self.reference is None else find_family(self.reference, "")

    @property
    def tokens(self) -> int:
        """The number of tokens of the largest microbatch."""
        return max(self.max_sequence_length, self.max_microbatch_tokens or 0)

    @property
    def usable_bytes(self) -> int | None:
        """The bytes of a device that a layout may take."""
        return None if self.memory_bytes is None else int(self.memory_bytes * USABLE)


@frozen(kw_only=True)
class Estimate:
    """Bytes of the fullest rank."""

    weights: int
    """Bytes of the policy's weights, of their copies in 8 bits, and of the reference's weights where there is one."""
    gradients: int
    optimizer: int
    """Bytes of the optimizer's state, and of float32 masters of narrower weights, divided among the ranks that hold the same
    weights."""
    activations: int
    """Bytes of the activations of the microbatches in flight."""
    logits: int
    step: int
    """Copies that the optimizer's step makes of gradients and state, when there are no activations."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + max(self.activations + self.logits, self.step)

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        if self.step > self.activations + self.logits:
            parts["copies of the optimizer's step"] = self.step
        else:
            parts |= {"activations": self.activations, "logits": self.logits}
        return ", ".join(f"{name} {gib(size)}" for name, size in parts.items())


@frozen(kw_only=True)
class Parameters:
    """The number of parameters of a rank."""

    dense: float
    """Attention, MLPs, routers, embedding and output layer: the same on all data · context ranks."""
    expert: float
    """The experts' MLPs: the same on all expert-data ranks."""
    tables: float
    """Embedding, output layer and vision tower, which `dense` counts too: AdamW trains them beside Muon."""

    @property
    def total(self) -> float:
        return self.dense + self.expert

    @classmethod
    def of(cls, dims: ModelDims, config: MegatronConfig) -> "Parameters":
        """The parameters of a rank of the fullest stage; the sizes in `config` are all numbers."""
        stages = layer_numbers_of_stages(config, dims.num_layers)
        tables = (2 if len(stages) == 1 and not dims.tied else 1) * dims.vocab_size * dims.hidden_size
        counts = [(sum(dims.has_experts[layer] for layer in layers), len(layers)) for layers in stages]
        found = [cls._of_layers(dims, config, *count, tables) for count in counts]
        if config.mtp:
            with_head = cls._of_layers(dims, config, counts[-1][0] + 1, counts[-1][1] + 1, tables)
            found[-1] = evolve(with_head, dense=with_head.dense + 2 * dims.hidden_size**2)
        return max(found, key=lambda stage: stage.total)

    @classmethod
    def _of_layers(cls, dims: ModelDims, config: MegatronConfig, num_moe: int, num_layers: int, tables: int) -> "Parameters":
        """The parameters of a stage with so many layers, `num_moe` of them with experts, and elements of embedding and head."""
        attention, narrow = attention_parameters(dims)
        mlps = (num_layers - num_moe) * 3 * dims.hidden_size * dims.intermediate_size
        shared = num_moe * 3 * dims.hidden_size * dims.shared_intermediate_size
        gates = num_moe * dims.hidden_size * (dims.num_experts + dims.has_shared_gate)
        experts = num_moe * dims.num_experts * 3 * dims.hidden_size * dims.moe_intermediate_size
        divided = num_layers * attention + mlps + shared + tables
        return cls(
            dense=divided / int(config.tensor_parallel) + gates + num_layers * narrow,
            tables=tables / int(config.tensor_parallel),
            expert=experts / (int(config.expert_parallel) * config.expert_tensor_parallel),
        )


def adapter_parameters(dims: ModelDims, load: Workload) -> int:
    """Elements of A and B of the whole model's adapters; 0 where there are none, or the model is of no family that is known."""
    family = load.family
    if load.lora is None or isinstance(family, Problem):
        return 0
    return load.lora.rank * sum(map(sum, adapted_layers(family, dims, load.lora).values()))


def estimate(dims: ModelDims, config: MegatronConfig, load: Workload) -> Estimate:
    """Estimate the fullest rank's memory at the peak of a training step, the sizes in `config` all being numbers."""
    item = ITEM_BYTES[load.dtype]
    without_head = evolve(config, mtp=False)
    config = config if load.trains else without_head
    tower = _tower_parameters(load.family)
    trained_tower = 0 if config.freeze == "vision" else tower
    parameters = Parameters.of(dims, config)
    parameters = evolve(parameters, dense=parameters.dense + trained_tower, tables=parameters.tables + trained_tower)
    held = parameters.total
    reference = None if load.reference is None else ModelDims.of(load.reference)
    unchanged = 0 if reference is None else Parameters.of(reference, without_head).total
    unchanged += _tower_parameters(load.reference_family)
    unchanged += tower - trained_tower
    stage = load.world_size // int(config.pipeline_parallel)
    owners = stage // int(config.tensor_parallel)
    expert_owners = stage // (int(config.expert_parallel) * config.expert_tensor_parallel)
    gradient = GRADIENT_BYTES if config.ddp.get("grad_reduce_in_fp32", True) else item
    owned = parameters.dense / owners + parameters.expert / expert_owners
    trained = adapter_parameters(dims, load) / int(config.pipeline_parallel)
    if load.lora is not None or not load.trains:
        # Float32 weights that are their own masters. What tensor ranks divide of them is left out: they are small.
        return Estimate(
            weights=int((held + unchanged) * item + 4 * trained),
            gradients=int(GRADIENT_BYTES * trained),
            optimizer=int(MOMENT_BYTES[load.optimizer.moments] * trained / owners),
            activations=int(_activation_elements(dims, config, load) * item),
            logits=_logits_bytes(dims, config, load),
            step=0,
        )
    largest = min(owned, max(STEP_ELEMENTS, dims.vocab_size * dims.hidden_size / int(config.tensor_parallel)))
    return Estimate(
        weights=int((held + unchanged + _lent_embedding(dims, config)) * item + _float8_bytes(dims, config)),
        gradients=int(held * gradient),
        optimizer=int(state_bytes(load.optimizer, config.optimizer, item, owned, parameters.tables / owners)),
        activations=int(_activation_elements(dims, config, load) * item),
        logits=_logits_bytes(dims, config, load),
        step=int(step_bytes(load.optimizer, config.optimizer, gradient, item, owned, largest)),
    )


def _tower_parameters(family: MegatronFamily | Problem | None) -> int:
    """Elements of the vision tower of a model of this family, whole on each rank of the first stage."""
    return family.vision_parameters if isinstance(family, MegatronFamily) else 0


def _lent_embedding(dims: ModelDims, config: MegatronConfig) -> float:
    """Elements of the first stage's embedding that the last has for the multi-token head while a step trains."""
    is_sent = config.mtp and int(config.pipeline_parallel) > 1
    return dims.vocab_size * dims.hidden_size / int(config.tensor_parallel) if is_sent else 0


def _float8_bytes(dims: ModelDims, config: MegatronConfig) -> float:
    """Bytes of weights' copies in 8 bits: by rows and by columns, since a GPU of Hopper multiplies along one side alone.
    Embedding and head have none, nor have layers kept in bfloat16, which are counted where another stage may be the fullest."""
    if not config.fp8:
        return 0
    narrow = narrow_dims(dims, config) if int(config.pipeline_parallel) == 1 else evolve(dims, vocab_size=0)
    return 2 * Parameters.of(narrow, config).total if narrow.num_layers else 0


def _logits_bytes(dims: ModelDims, config: MegatronConfig, load: Workload) -> int:
    family = load.family
    is_capped = not isinstance(family, Problem) and family.logit_cap is not None
    tensor = int(config.tensor_parallel)
    elements = min(LOGITS_ELEMENTS, load.tokens * dims.vocab_size // (1 if config.batch_invariant else tensor))
    # Each rank has the whole head then, its gradient in float32, and that in bfloat16.
    head = 8 * dims.vocab_size * dims.hidden_size if config.batch_invariant and tensor > 1 else 0
    return elements * (LOGITS_BYTES + (SLOPE_BYTES if is_capped else 0)) + head


def _activation_elements(dims: ModelDims, config: MegatronConfig, load: Workload) -> float:
    """Kept by the stage with most; the first has as many microbatches in flight as there are stages, and with virtual stages a
    little more, each later one has one fewer; and by one layer while it is computed again or backwards."""
    stages, virtual = int(config.pipeline_parallel), config.virtual_pipeline_parallel
    layer = _layer_elements(dims, config) + _output_norm_elements(dims, config, load)
    scores = _score_elements(dims, config, load)
    if not uses_transformer_engine(config, load.device, load.dtype):
        layer *= UNFUSED
    in_flight = stages if virtual == 1 else stages + (stages - 1) / virtual
    kept = _residual(dims, config) if config.recompute == "full" else layer
    modules = config.transformer.get("recompute_modules") or ("core_attn",)
    if config.recompute == "none" or (config.recompute == "selective" and "core_attn" not in modules):
        kept += scores
    counts = list(layers_of_stages(config, dims.num_layers))
    counts[-1] += config.mtp  # the multi-token head's layer
    most = max(count * (in_flight - stage) for stage, count in enumerate(counts))
    return (kept * most + layer + scores) * load.tokens / int(config.context_parallel)


def _score_elements(dims: ModelDims, config: MegatronConfig, load: Workload) -> float:
    """Elements per token of the scores that a layer with sinks or caps keeps, in float32 and once more as the values are
    weighed, and of caps behind the tanh; no others keep any."""
    family, item = load.family, ITEM_BYTES[load.dtype]
    if isinstance(family, Problem) or not family.stores_scores:
        return 0
    num_bytes = ITEM_BYTES["float32"] + (item if item < ITEM_BYTES["float32"] else 0)
    num_bytes += item if family.score_cap is not None else 0
    return dims.num_heads / int(config.tensor_parallel) * load.max_sequence_length * num_bytes / item


def _output_norm_elements(dims: ModelDims, config: MegatronConfig, load: Workload) -> float:
    """Elements per token of the inputs and outputs of the norms behind attention and MLP."""
    family = load.family
    return 0 if isinstance(family, Problem) or not family.has_output_norms else 4 * _residual(dims, config)


def _residual(dims: ModelDims, config: MegatronConfig) -> float:
    """Elements per token of the input of a layer."""
    return dims.hidden_size / (int(config.tensor_parallel) if config.sequence_parallel else 1)


def _layer_elements(dims: ModelDims, config: MegatronConfig) -> float:
    """Elements per token that the mean layer keeps for its backward pass."""
    tensor = int(config.tensor_parallel)
    # Inputs and outputs of both norms, and what attention keeps.
    attention = 4 * _residual(dims, config) + _attention_elements(dims, tensor)
    if dims.latent is not None:  # narrow states before and after their norms
        narrow = 2 * (dims.latent.query_rank or 0) + 2 * dims.latent.key_rank + dims.latent.rotary_width
        attention += narrow / dims.hidden_size * _residual(dims, config)
    mlp = 3 * dims.intermediate_size / tensor
    # Each rank sees its part of the tokens' copies; those are dispatched, multiplied, and sent back.
    width = 3 * dims.hidden_size + 3 * dims.moe_intermediate_size / config.expert_tensor_parallel
    experts = (dims.num_experts_per_token * config.expert_tensor_parallel * width + 3 * dims.shared_intermediate_size) / tensor
    return attention + (dims.num_dense_layers * mlp + dims.num_moe_layers * experts) / dims.num_layers


def _attention_elements(dims: ModelDims, tensor: int) -> float:
    """Elements per token of a rank's heads: queries, keys and values before and after rotation, and the output."""
    if dims.latent is None:
        return 3 * (dims.num_heads / tensor + max(1, dims.num_kv_heads / tensor)) * dims.head_dim
    return dims.num_heads / tensor * (3 * dims.latent.key_width + dims.latent.plain_width + 3 * dims.latent.value_width)
