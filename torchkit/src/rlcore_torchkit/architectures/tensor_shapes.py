"""The tensors of a dense model of a described family."""

from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.dims import ModelDims


def tensor_shapes(family: Architecture, dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model without experts, multi-latent attention and optional biases, by its name."""
    names = family.modules
    queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    hidden, inner = dims.hidden_size, dims.intermediate_size
    layer: dict[str, tuple[int, ...]] = {f"{names.input_norm}.weight": (hidden,)}
    for name, width in ((names.query, queries), (names.key, keys), (names.value, keys)):
        layer[f"{name}.weight"] = (width, hidden)
        if family.has_qkv_biases:
            layer[f"{name}.bias"] = (width,)
    if family.has_qk_norms:
        layer |= {f"{name}.weight": (dims.head_dim,) for name in (names.query_norm, names.key_norm)}
    layer |= {f"{names.output}.weight": (hidden, queries), f"{names.mlp_norm}.weight": (hidden,)}
    layer |= {f"{names.mlp}.{name}.weight": (inner, hidden) for name in (names.gate, names.up)}
    layer[f"{names.mlp}.{names.down}.weight"] = (hidden, inner)
    shapes: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (dims.vocab_size, hidden)}
    for number in range(dims.num_layers):
        shapes |= {f"{names.layers}.{number}.{name}": shape for name, shape in layer.items()}
    shapes[f"{names.norm}.weight"] = (hidden,)
    return shapes if dims.tied else {**shapes, f"{names.head}.weight": (dims.vocab_size, hidden)}
