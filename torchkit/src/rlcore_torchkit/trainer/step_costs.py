"""Estimates of a trainer's seconds on devices of a kind, from a model's sizes; the `plan` of trainers is made of them.

A roofline of four parts: matrix products, attention, what moves memory alone, and the host's launches, beside which the
exchanges between ranks that nothing hides. The efficiencies below are the same for all models, layouts and devices;
docs/plan.md names the measurements that each is from.
"""

from typing import Literal, TypeAlias

from attrs import frozen

from rlcore.spi import DeviceSpec, OptimizerSpec
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.optimizer.settings import BLOCK

PRODUCTS = 0.69
"""Share of the peak in matrix products: 677 TFLOP/s of 989 in updates of 8B, 715 in those of 1.5B."""
FLOAT8_PRODUCTS = 0.50
"""Share of the 8-bit peak in products of 8 bits and in rounding what they multiply: steps of 8B on H200. It was not
measured on Blackwell."""
ATTENTION = 0.45
"""Share of the peak in attention's products."""
MEMORY = 0.5
"""Share of the bandwidth in what moves memory alone."""
MOVED = 40
"""Elements per token and layer, in hidden sizes, that norms, residuals and rotations read and write forward and backward."""
GATE = 8
"""Elements that gates read and write, in widths of the MLP."""
ROUTED = 10
"""Elements of tokens' copies that are dispatched to experts and back, in hidden sizes."""
FORWARD_SHARE = 0.35
"""Share of what is moved both ways that the forward pass moves."""
LAUNCHES, EXPERT_LAUNCHES = 30, 66
"""Kernels of one layer forward, without and with experts."""
FLOAT8_LAUNCHES = 10
"""Kernels of one layer forward that round to 8 bits, beside the others: 0.2 s of an update of 1.5B, which waits for them."""
EACH_EXPERT_LAUNCHES = 2
"""Kernels that each expert of a rank adds: forward, or, where one kernel multiplies by all of them, backward alone."""
GROUPED = ("H100", "H200")
"""Devices on which one kernel does."""
BACKWARD_LAUNCHES = 1.5
LAUNCH_S = 80e-6
"""Seconds of the host for a kernel."""
EXPERT_WAIT_S = 3e-3
"""Seconds that ranks wait for each other in a layer whose experts they share, in each direction."""
LINK = 0.7
"""Share of a link's rate in collectives of large tensors."""
BYTES = 2
"""Bytes of an activation or weight in the compute dtype."""


Float8: TypeAlias = Literal["none", "without experts", "all"]


@frozen(kw_only=True)
class Layout:
    """The sizes of a layout that cost time."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    """Data-parallel ranks; experts' ranks are among them."""
    crosses_nodes: frozenset[str] = frozenset()
    """Dimensions whose ranks are on several machines, of "tensor", "context", "pipeline", "expert" and "data"."""
    kernels: float = 1.0
    """The memory traffic of layers, in relation to fused kernels."""
    gathers_weights: bool = False
    """True where each layer's weights are gathered from the data ranks for each microbatch and pass."""
    float8: Float8 = "none"
    """The products of the decoder's layers in 8 bits: all but attention's and routers', or without experts' either."""
    wide_layers: tuple[int, int] = (0, 0)
    """The number of layers at the start and at the end without products in 8 bits."""
    float8_weight_gradients: bool = True
    """True where the products that make the gradients of weights are among them, a third of a training step's."""


@frozen(kw_only=True)
class Tokens:
    """The tokens that all ranks compute together."""

    number: float
    squared: float
    """The sum of the squared lengths of the sequences."""
    longest: float
    per_microbatch: int


def attention_parameters(dims: ModelDims) -> tuple[float, float]:
    """Count the parameters of a layer's attention that tensor ranks divide, and those that each has whole; of the mean layer
    where some have a gated delta net or an indexer."""
    hidden, heads, latent = dims.hidden_size, dims.num_heads, dims.latent
    if latent is None:
        gates = heads if dims.has_output_gates else 0
        attention = hidden * dims.head_dim * (2 * (heads + dims.num_kv_heads) + gates)
        if dims.delta is None or not dims.num_layers:
            return attention, 0
        num_delta = sum(dims.has_delta)
        delta = num_delta * dims.delta.num_parameters(hidden)
        return ((dims.num_layers - num_delta) * attention + delta) / dims.num_layers, 0
    queries = (latent.query_rank or hidden) * latent.key_width
    keys_and_values = latent.key_rank * (latent.plain_width + latent.value_width)
    narrow = (latent.query_rank or 0) + latent.key_rank + latent.rotary_width
    whole = float(hidden * narrow)
    if dims.indexer is not None and dims.num_layers:
        columns = (latent.query_rank or 0) * dims.indexer.num_heads * dims.indexer.width
        of_indexer = columns + hidden * (dims.indexer.width + dims.indexer.num_heads)
        whole += of_indexer * sum(dims.indexer.layers) / dims.num_layers
    return heads * (queries + keys_and_values + hidden * latent.value_width), whole


def layer_parameters(dims: ModelDims) -> tuple[float, float]:
    """The parameters of all layers without the experts', and the experts'."""
    attention = dims.num_layers * sum(attention_parameters(dims))
    mlps = dims.num_dense_layers * 3 * dims.hidden_size * dims.intermediate_size
    of_all_tokens = 3 * dims.shared_intermediate_size + dims.num_experts + dims.has_shared_gate
    shared = dims.num_moe_layers * dims.hidden_size * of_all_tokens
    experts = dims.num_moe_layers * dims.num_experts * 3 * dims.hidden_size * dims.moe_intermediate_size
    return attention + mlps + shared, experts


def num_parameters(dims: ModelDims) -> float:
    """Count all parameters but norms and biases, a thousandth of the whole."""
    return sum(layer_parameters(dims)) + (1 if dims.tied else 2) * dims.vocab_size * dims.hidden_size


def state_bytes(spec: OptimizerSpec, dims: ModelDims, num_trained: float | None = None) -> float:
    """Bytes of the optimizer's state without masters: of all parameters, or of adapters' `num_trained`.

    Embeddings and heads are what AdamW trains beside Muon; groups are left out.
    """
    of_moments = 8.0 if spec.moments == "float32" else 2 * (1 + 4 / BLOCK)
    if num_trained is not None:
        return of_moments * num_trained
    in_layers = sum(layer_parameters(dims))
    of_layers = 4.0 if spec.name == "muon" else of_moments
    return of_layers * in_layers + of_moments * (num_parameters(dims) - in_layers)


def active_parameters(dims: ModelDims) -> float:
    """Count the parameters in the products of a token; the head's are among them, the embedding's are not."""
    plain, experts = layer_parameters(dims)
    return plain + experts * dims.num_experts_per_token / max(dims.num_experts, 1) + dims.vocab_size * dims.hidden_size


def float8_parameters(dims: ModelDims, layout: Layout) -> float:
    """Active parameters whose products are of 8 bits; neither the head's nor routers'."""
    dims = dims.without_ends(*layout.wide_layers)
    plain, experts = layer_parameters(dims)
    linear = plain - dims.num_moe_layers * dims.hidden_size * dims.num_experts
    active = experts * dims.num_experts_per_token / max(dims.num_experts, 1)
    return {"none": 0.0, "without experts": linear, "all": linear + active}[layout.float8]


def attention_flops(dims: ModelDims, squared: float) -> float:
    """Forward, of causal attention within sequences with this sum of squared lengths."""
    latent = dims.latent
    width = 2 * dims.head_dim if latent is None else latent.key_width + latent.value_width
    return dims.num_layers * dims.num_heads * width * squared


def num_microbatches(tokens: Tokens, layout: Layout) -> float:
    """Microbatches of each data-parallel rank; the last of them are as full as the others on average."""
    each = max(tokens.per_microbatch, tokens.longest)
    return max(1.0, tokens.number / layout.data / each)


def pass_seconds(
    dims: ModelDims, device: DeviceSpec, tokens: Tokens, layout: Layout, *, trains: bool, recomputes: bool = False
) -> float:
    """Seconds of a forward pass over all tokens, with the backward pass where it `trains`; optimizer left out.

    `recomputes`: layers are computed again in the backward pass.
    """
    ranks = layout.data * layout.context * layout.tensor * layout.pipeline
    passes = (4.0 if recomputes else 3.0) if trains else 1.0
    products = _product_seconds(dims, device, layout, passes, trains=trains) * tokens.number
    attention = attention_flops(dims, tokens.squared) * (passes + (0.5 if trains else 0.0)) / ATTENTION / device.flops
    shares = (1.0 + (FORWARD_SHARE if recomputes else 0.0)) if trains else FORWARD_SHARE
    moved = _moved_bytes(dims) * layout.kernels * shares * tokens.number / MEMORY
    computing = (products + attention + moved / device.bandwidth) / ranks
    steps = num_microbatches(tokens, layout)
    exchanging = _exchange_seconds(dims, device, tokens, layout) * passes
    gathering = _gather_seconds(dims, device, layout) * steps * min(passes, 2.0)
    launching = steps * _launches(dims, device, layout, trains=trains, recomputes=recomputes) * LAUNCH_S
    bubble = 1 + (layout.pipeline - 1) / steps
    return (max(computing + exchanging, gathering, launching) + _waits(dims, layout, passes) * steps) * bubble


def _product_seconds(dims: ModelDims, device: DeviceSpec, layout: Layout, passes: float, *, trains: bool) -> float:
    """Seconds of one token's products, but for attention's."""
    head = 2.0 * dims.vocab_size * dims.hidden_size * (1 if trains else 0)  # its logits are computed again in chunks
    products = 2 * active_parameters(dims) * passes + head
    if device.float8_flops is None:
        return products / PRODUCTS / device.flops
    narrow_passes = passes - (1 if trains and not layout.float8_weight_gradients else 0)
    narrow = 2 * float8_parameters(dims, layout) * narrow_passes
    return (products - narrow) / PRODUCTS / device.flops + narrow / FLOAT8_PRODUCTS / device.float8_flops


def update_seconds(device: DeviceSpec, layout: Layout, num_trained: float, bytes_touched: float) -> float:
    """Seconds that gradients are reduced, weights gathered and the optimizer steps: `bytes_touched` of a rank's own state."""
    ranks = max(1, layout.data * layout.context)
    held = num_trained / layout.tensor / layout.pipeline
    rate = (device.network if "data" in layout.crosses_nodes else device.link) * LINK
    exchanged = held * 3 * BYTES * (ranks - 1) / ranks / rate / 2  # half of it beside the last backward pass
    return exchanged + bytes_touched / device.bandwidth / MEMORY


def _moved_bytes(dims: ModelDims) -> float:
    """Per token, forward and backward, of all layers."""
    plain = dims.num_layers * MOVED * dims.hidden_size + dims.num_dense_layers * GATE * dims.intermediate_size
    routed = dims.num_experts_per_token * (GATE * dims.moe_intermediate_size + ROUTED * dims.hidden_size)
    return BYTES * (plain + dims.num_moe_layers * (routed + GATE * dims.shared_intermediate_size))


def _launches(dims: ModelDims, device: DeviceSpec, layout: Layout, *, trains: bool, recomputes: bool) -> float:
    """Kernels of one microbatch in one stage."""
    shared = dims.num_dense_layers * LAUNCHES + dims.num_moe_layers * EXPERT_LAUNCHES
    of_each = dims.num_moe_layers * EACH_EXPERT_LAUNCHES * dims.num_experts / layout.expert
    rounding = 0 if layout.float8 == "none" else dims.without_ends(*layout.wide_layers).num_layers
    shared += rounding * FLOAT8_LAUNCHES
    forward = shared + (0 if device.name in GROUPED else of_each)
    backward = BACKWARD_LAUNCHES * forward + (of_each if device.name in GROUPED else 0)
    return (forward * (2 if trains and recomputes else 1) + (backward if trains else 0)) / layout.pipeline


def _waits(dims: ModelDims, layout: Layout, passes: float) -> float:
    """Seconds that one microbatch waits in one stage."""
    return EXPERT_WAIT_S * dims.num_moe_layers / layout.pipeline * passes if layout.expert > 1 else 0.0


def _exchange_seconds(dims: ModelDims, device: DeviceSpec, tokens: Tokens, layout: Layout) -> float:
    """Seconds of one pass over a rank's tokens, in collectives that the layers wait for."""
    hidden = BYTES * dims.hidden_size * tokens.number / layout.data / layout.context
    layers = dims.num_layers / layout.pipeline
    total = 0.0
    if layout.tensor > 1:  # two gathers and two scatters a layer
        total += 4 * layers * hidden * (layout.tensor - 1) / layout.tensor / _rate(device, layout, "tensor")
    if layout.context > 1:
        keys = BYTES * 2 * dims.num_kv_heads * dims.head_dim / layout.tensor * tokens.number / layout.data / layout.context
        total += layers * keys * (layout.context - 1) / _rate(device, layout, "context") / 2
    if layout.expert > 1:  # to the experts and back
        sent = 2 * hidden * dims.num_experts_per_token / layout.tensor * (layout.expert - 1) / layout.expert
        total += dims.num_moe_layers / layout.pipeline * sent / _rate(device, layout, "expert")
    if layout.pipeline > 1:
        total += hidden / layout.tensor / _rate(device, layout, "pipeline")
    return total


def _gather_seconds(dims: ModelDims, device: DeviceSpec, layout: Layout) -> float:
    """Seconds of gathering all weights for one pass of one microbatch, beside which the layers compute."""
    if not layout.gathers_weights:
        return 0.0
    plain, experts = layer_parameters(dims)
    ranks = layout.data * layout.context
    held = (plain + 2 * dims.vocab_size * dims.hidden_size + experts / layout.expert) / layout.tensor
    return BYTES * held * (ranks - 1) / ranks / _rate(device, layout, "data")


def _rate(device: DeviceSpec, layout: Layout, name: str) -> float:
    return (device.network if name in layout.crosses_nodes else device.link) * LINK


def refit_seconds(dims: ModelDims, device: DeviceSpec, *, travels: bool, crosses_nodes: bool = False) -> float:
    """Seconds until an engine holds the weights: a call a tensor, digests on both sides, and what `travels` between devices, of
    one machine or of several."""
    num_tensors = dims.num_layers * 9 + dims.num_moe_layers * 3 * dims.num_experts + 3
    num_bytes = BYTES * num_parameters(dims)
    travelled = num_bytes / ((device.network if crosses_nodes else device.link) * LINK) if travels else 0.0
    return REFIT_S + TENSOR_S * num_tensors + 4 * num_bytes / device.bandwidth + travelled


TENSOR_S = 45e-6
"""Seconds of the host for a tensor of a refit: 0.97 for 18,867 of them by CUDA IPC, of which their bytes are 0.05."""
REFIT_S = 0.07
"""Seconds of a refit of any size: between what 8B by CUDA IPC (0.145) and 1.5B (0.071) take beyond their tensors and bytes."""
