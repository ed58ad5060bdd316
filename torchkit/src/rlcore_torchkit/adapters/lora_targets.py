"""Find the linear layers of a decoder that have adapters, from its config.json alone, without torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import nearest
from rlcore.spi.context import ALL_LINEAR, CheckContext, LoraSpec
from rlcore.spi.errors import Problem
from rlcore_torchkit.adapters.peft_check import adapter_problems
from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.dims import LatentDims, ModelDims
from rlcore_torchkit.architectures.modules import ModuleNames
from rlcore_torchkit.architectures.registry import NO_FAMILIES, Families, find_architecture
from rlcore_torchkit.huggingface.model_check import config_file, model_config

LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"
"""Behind a layer's name: A [rank, in] and B [out, rank]."""

Shape = tuple[int, int]
"""(out, in) of a linear layer."""


def linear_layers(family: Architecture, dims: ModelDims) -> dict[str, Shape]:
    """Hugging Face name to shape of every linear layer in the decoder's layers, in their order."""
    names = family.modules
    attention = _attention(names, dims) if dims.latent is None else _latent_attention(names, dims, dims.latent)
    mlp = _gated(names, names.mlp, (dims.intermediate_size, dims.hidden_size))
    shared = _gated(names, names.shared_expert, (dims.shared_intermediate_size, dims.hidden_size))
    of_all_tokens = shared if dims.shared_intermediate_size else {}
    return {
        f"{names.layers}.{layer}.{name}": shape
        for layer, has_experts in enumerate(dims.has_experts)
        for name, shape in (attention | (of_all_tokens if has_experts else mlp)).items()
    }


def _attention(names: ModuleNames, dims: ModelDims) -> dict[str, Shape]:
    heads, key_heads, hidden = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim, dims.hidden_size
    return {
        names.query: (heads, hidden),
        names.key: (key_heads, hidden),
        names.value: (key_heads, hidden),
        names.output: (hidden, heads),
    }


def _latent_attention(names: ModuleNames, dims: ModelDims, latent: LatentDims) -> dict[str, Shape]:
    heads, hidden = dims.num_heads, dims.hidden_size
    if latent.query_rank is None:
        queries = {names.query: (heads * latent.key_width, hidden)}
    else:
        rank = latent.query_rank
        queries = {names.query_down: (rank, hidden), names.query_up: (heads * latent.key_width, rank)}
    return queries | {
        names.key_value_down: (latent.key_rank + latent.rotary_width, hidden),
        names.key_value_up: (heads * (latent.plain_width + latent.value_width), latent.key_rank),
        names.output: (hidden, heads * latent.value_width),
    }


def _gated(names: ModuleNames, name: str, shape: Shape) -> dict[str, Shape]:
    return {f"{name}.{names.gate}": shape, f"{name}.{names.up}": shape, f"{name}.{names.down}": shape[::-1]}


def is_target(name: str, target: str) -> bool:
    """Return whether a module's name matches one of PEFT's target_modules: it equals it, or ends in it after a dot."""
    return target == ALL_LINEAR or name == target or name.endswith(f".{target}")


def adapted_layers(family: Architecture, dims: ModelDims, spec: LoraSpec) -> dict[str, Shape]:
    """Name to shape of the linear layers that have an adapter, in the model's order."""
    return targeted(linear_layers(family, dims), spec)


def targeted(layers: Mapping[str, Shape], spec: LoraSpec) -> dict[str, Shape]:
    """The linear layers of a model that the adapters' targets name."""
    return {name: shape for name, shape in layers.items() if any(is_target(name, target) for target in spec.targets)}


def adapter_shapes(layers: Mapping[str, Shape], rank: int) -> dict[str, Shape]:
    """Name to shape of A and B of each of these layers."""
    shapes = {}
    for name, (rows, columns) in layers.items():
        shapes[f"{name}.{LORA_A}"] = (rank, columns)
        shapes[f"{name}.{LORA_B}"] = (rows, rank)
    return shapes


def is_adapter(name: str) -> bool:
    """Return whether a tensor's name is that of an adapter's A or B."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def lora_problems(context: CheckContext, families: Families = NO_FAMILIES) -> Iterator[Problem]:
    """Targets that the model has not, and adapters to begin with that are not for this model or another form."""
    model, spec = model_config(context, families), context.lora
    if spec is not None and context.head == "value":
        yield Problem(
            path="lora",
            found="the section, with an algorithm that trains a model of values",
            expected="no such section: a head of values is trained whole, and adapters are all that a PEFT directory holds",
            remedy="Leave it out.",
        )
        return
    if spec is None or model is None:
        return
    family, dims = find_architecture(model, str(config_file(context)), families), ModelDims.of(model)
    if isinstance(family, Problem) or dims is None:
        return
    problems = list(target_problems(linear_layers(family, dims), spec))
    yield from problems
    if spec.init_from is not None and not problems:
        shapes = adapter_shapes(adapted_layers(family, dims, spec), spec.rank)
        at = None if expanded(context.model.path).exists() else context.model.revision or "main"
        yield from adapter_problems(spec, spec.init_from, context.model.path, shapes, revision=at)


def target_problems(layers: Mapping[str, Any], spec: LoraSpec) -> Iterator[Problem]:
    """A problem for each target that is no linear layer of the model."""
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in layers)
    for target in spec.targets:
        if any(is_target(name, target) for name in layers):
            continue
        near = nearest(target, [*kinds, ALL_LINEAR])
        yield Problem(
            path="lora.targets",
            found=f'"{target}", which is the end of no linear layer\'s name',
            expected=f"the ends of names in the decoder's layers: {', '.join(kinds)}, or {ALL_LINEAR}; experts have none",
            remedy=f'Did you mean "{near}"?' if near else "",
        )
