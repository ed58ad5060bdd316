"""Which tensors of Hugging Face's files each of Megatron's parameters is made of; imports no torch.

Our own tables rather than a bridge package: four architectures need one form of a layer, loading has to read slices, and what
such packages demand of transformers' version would bind every other plugin of an installation.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

from rlcore.spi import ModelError, Problem
from rlcore_torchkit.architectures.dims import ModelDims, expert_layers

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
_SINGLE_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""TransformerEngine keeps the weight of a norm in the linear layer after it."""


@frozen(kw_only=True)
class HfTensor:
    """One tensor of a model file."""

    name: str
    shape: tuple[int, ...]
    divided: Literal[0, 1] | None = None
    """The dimension that tensor ranks divide; None where each has all of it."""
    fused: tuple[str, int, int] | None = field(default=None, eq=False)
    """Where a file that keeps a layer's experts in one tensor has it: that tensor's name, the expert, and the first row."""

    def part_shape(self, size: int) -> tuple[int, ...]:
        """What one of `size` ranks has of it."""
        return tuple(length // size if dim == self.divided else length for dim, length in enumerate(self.shape))


@frozen(kw_only=True)
class Source:
    """One parameter of the whole model."""

    parameter: str
    """Megatron's name of it in a model that is not divided, with layers numbered through, experts too."""
    tensors: tuple[HfTensor, ...]
    """What its rows are taken from: of each query group, or tensor rank, first some of the first tensor, then of the next."""
    groups: int | None = None
    """Query groups that the rows are ordered by; None where each tensor rank has one run of every tensor."""
    layer: int | None = None
    expert: int | None = None

    def local_groups(self, size: int) -> int:
        """How many of them each of `size` ranks has."""
        return 1 if self.groups is None else self.groups // size


@frozen(kw_only=True, eq=False)
class Names:
    """The whole model's parameters and tensors."""

    sources: Mapping[str, Source]
    """By Source.parameter."""
    order: tuple[HfTensor, ...]
    """All tensors, as `save_pretrained` and the other trainers name and order them."""
    tied: bool
    num_experts: int

    @classmethod
    def of(cls, model: Mapping[str, Any], path: str = "config.json") -> "Names":
        """From the content of config.json; ModelError where an architecture has no mapping. `path` is what errors name."""
        problems = name_problems(model, path)
        if problems:
            raise ModelError(problems)
        dims = ModelDims.of(model)
        assert dims is not None
        sources = list(_sources(model, dims))
        order = tuple(tensor for layer in _by_layer(sources) for tensor in _hugging_face_order(layer))
        return cls(
            sources={source.parameter: source for source in sources},
            order=order,
            tied=dims.tied,
            num_experts=dims.num_experts,
        )

    def of_part(self, part: Any, expert_rank: int, num_expert_ranks: int) -> dict[str, Source]:
        """By the name of each parameter of this part of the model; ModelError for one that files have nothing for."""
        first_expert = self.num_experts // num_expert_ranks * expert_rank
        layers = [layer.layer_number - 1 for layer in part.decoder.layers]
        found = {name: self._global_name(name, layers, first_expert) for name, _ in part.named_parameters()}
        unknown = [name for name, whole in found.items() if whole not in self.sources]
        if unknown:
            raise ModelError([_unknown(unknown)])
        return {name: self.sources[whole] for name, whole in found.items()}

    def _global_name(self, name: str, layers: Sequence[int], first_expert: int) -> str:
        if self.tied and name == OUTPUT:
            return EMBEDDING  # the copy on the last stage
        match = _LAYER.fullmatch(name)
        if match is None:
            return name
        within = _FUSED_NORMS.get(match[2], match[2])
        if grouped := _GROUPED_EXPERT.fullmatch(within):
            within = _expert_name(first_expert + int(grouped[2]), grouped[1])
        elif single := _SINGLE_EXPERT.fullmatch(within):
            within = _expert_name(first_expert + int(single[1]), single[2])
        return f"decoder.layers.{layers[int(match[1])]}.{within}"


def name_problems(model: Mapping[str, Any], path: str) -> list[Problem]:
    """Why the model with this config cannot be held in Megatron's parameters; empty where it can."""
    architecture = (model.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        return [Problem(path=path, found=f"architecture {architecture}", expected="one of " + ", ".join(FAMILIES))]
    remedy = "Take another trainer for this model"
    return [
        Problem(path=path, found=f"{key} = true", expected=f"false: {where} has no bias in Megatron's layers", remedy=remedy)
        for key, where in (("attention_bias", "the output of attention"), ("mlp_bias", "the MLP"))
        if model.get(key)
    ]


def _unknown(names: Sequence[str]) -> Problem:
    return Problem(
        path="trainer.megatron.transformer",
        found=f"parameters {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}",
        expected="those that Hugging Face's files have tensors for",
        remedy="Leave out what adds them",
    )


def _sources(model: Mapping[str, Any], dims: ModelDims) -> Iterator[Source]:
    table = (dims.vocab_size, dims.hidden_size)
    yield _plain(EMBEDDING, "model.embed_tokens.weight", table, 0)
    family = FAMILIES[model["architectures"][0]]
    for layer, has_experts in enumerate(expert_layers(model)):
        yield from _attention(layer, dims, has_bias=family == "qwen2", has_norms=family in ("qwen3", "qwen3_moe"))
        yield from _experts(layer, dims) if has_experts else _mlp(layer, dims)
        for ours, theirs in (("input", "input"), ("pre_mlp", "post_attention")):
            yield _in_layer(layer, f"{ours}_layernorm.weight", f"{theirs}_layernorm.weight", (dims.hidden_size,))
    yield _plain("decoder.final_layernorm.weight", "model.norm.weight", (dims.hidden_size,))
    if not dims.tied:
        yield _plain(OUTPUT, "lm_head.weight", table, 0)


def _attention(layer: int, dims: ModelDims, *, has_bias: bool, has_norms: bool) -> Iterator[Source]:
    rows = {"q": dims.num_heads * dims.head_dim} | dict.fromkeys("kv", dims.num_kv_heads * dims.head_dim)
    for kind, columns in (("weight", (dims.hidden_size,)), ("bias", ())) if has_bias else (("weight", (dims.hidden_size,)),):
        yield Source(
            parameter=f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}",
            tensors=tuple(
                HfTensor(name=f"model.layers.{layer}.self_attn.{name}_proj.{kind}", shape=(num, *columns), divided=0)
                for name, num in rows.items()
            ),
            groups=dims.num_kv_heads,
            layer=layer,
        )
    yield _in_layer(
        layer, "self_attention.linear_proj.weight", "self_attn.o_proj.weight", (dims.hidden_size, rows["q"]), divided=1
    )
    for name in "qk" if has_norms else "":
        yield _in_layer(layer, f"self_attention.{name}_layernorm.weight", f"self_attn.{name}_norm.weight", (dims.head_dim,))


def _mlp(layer: int, dims: ModelDims) -> Iterator[Source]:
    yield _gate_and_up(layer, "mlp.linear_fc1.weight", "mlp", (dims.intermediate_size, dims.hidden_size))
    yield _in_layer(
        layer, "mlp.linear_fc2.weight", "mlp.down_proj.weight", (dims.hidden_size, dims.intermediate_size), divided=1
    )


def _experts(layer: int, dims: ModelDims) -> Iterator[Source]:
    for expert in range(dims.num_experts):
        where = f"mlp.experts.{expert}"
        yield _gate_and_up(
            layer, _expert_name(expert, "linear_fc1"), where, (dims.moe_intermediate_size, dims.hidden_size), expert
        )
        yield _in_layer(
            layer,
            _expert_name(expert, "linear_fc2"),
            f"{where}.down_proj.weight",
            (dims.hidden_size, dims.moe_intermediate_size),
            divided=1,
            expert=expert,
            fused=(f"model.layers.{layer}.mlp.experts.down_proj", expert, 0),
        )
    yield _in_layer(layer, "mlp.router.weight", "mlp.gate.weight", (dims.num_experts, dims.hidden_size))


def _expert_name(expert: int, linear: str) -> str:
    return f"mlp.experts.local_experts.{expert}.{linear}.weight"


def _gate_and_up(layer: int, parameter: str, where: str, shape: tuple[int, int], expert: int | None = None) -> Source:
    fused = f"model.layers.{layer}.mlp.experts.gate_up_proj"
    return Source(
        parameter=f"decoder.layers.{layer}.{parameter}",
        tensors=tuple(
            HfTensor(
                name=f"model.layers.{layer}.{where}.{name}_proj.weight",
                shape=shape,
                divided=0,
                fused=None if expert is None else (fused, expert, index * shape[0]),
            )
            for index, name in enumerate(("gate", "up"))
        ),
        layer=layer,
        expert=expert,
    )


def _in_layer(
    layer: int,
    parameter: str,
    name: str,
    shape: tuple[int, ...],
    divided: Literal[0, 1] | None = None,
    expert: int | None = None,
    fused: tuple[str, int, int] | None = None,
) -> Source:
    tensor = HfTensor(name=f"model.layers.{layer}.{name}", shape=shape, divided=divided, fused=fused)
    return Source(parameter=f"decoder.layers.{layer}.{parameter}", tensors=(tensor,), layer=layer, expert=expert)


def _plain(parameter: str, name: str, shape: tuple[int, ...], divided: Literal[0, 1] | None = None) -> Source:
    return Source(parameter=parameter, tensors=(HfTensor(name=name, shape=shape, divided=divided),))


def _by_layer(sources: Sequence[Source]) -> Iterator[list[Source]]:
    from itertools import groupby

    for _, layer in groupby(sources, key=lambda source: source.layer):
        yield list(layer)


_ROLES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_norm",
    "k_norm",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def _hugging_face_order(layer: Sequence[Source]) -> list[HfTensor]:
    """Queries before keys, with their biases; all experts' gates before their other columns."""

    def rank(tensor: HfTensor) -> int:
        role = tensor.name.split(".")[-2]
        return _ROLES.index(role) if role in _ROLES else len(_ROLES)

    return sorted((tensor for source in layer for tensor in source.tensors), key=rank)
