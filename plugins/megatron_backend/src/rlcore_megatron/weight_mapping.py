"""Which tensors of Hugging Face's files each of Megatron's parameters is made of; imports no torch.

Our own tables rather than a bridge package: all families have one form of a layer, loading has to read slices, and what such
packages demand of transformers' version would bind every other plugin of an installation.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from attrs import field, frozen

from rlcore.schema.listing import listed
from rlcore.spi import Head, ModelError, Problem
from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.modules import ModuleNames
from rlcore_torchkit.models import architecture_of, dims_of, standard_config

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
ADAPTERS = "adapters."
"""What the names of adapters' parameters begin with."""
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
    tp_dim: Literal[0, 1] | None = None
    """The dimension that tensor ranks divide; None where each has all of it."""
    fused: tuple[str, int, int] | None = field(default=None, eq=False)
    """Where a file that keeps a layer's experts in one tensor has it: that tensor's name, the expert, and the first row."""

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """What one of `size` ranks has of it."""
        return tuple(length // size if dim == self.tp_dim else length for dim, length in enumerate(self.shape))


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
        """How many of them each of `size` ranks has, or has a part of."""
        return 1 if self.groups is None else max(1, self.groups // size)

    def splits_groups(self, size: int) -> bool:
        """Whether several of `size` ranks share a query group, each a run of its rows, of queries, then key, then value."""
        return self.groups is not None and self.groups < size


@frozen(kw_only=True, eq=False)
class Names:
    """The whole model's parameters and tensors."""

    sources: Mapping[str, Source]
    """The source of each parameter, by Source.parameter."""
    order: tuple[HfTensor, ...]
    """All tensors, as `save_pretrained` and the other trainers name and order them."""
    tied: bool
    num_experts: int
    of_adapters: bool = False
    """Whether these are the names of adapters, and not of the weights below them."""

    @classmethod
    def of(cls, hf: Any, head: Head = "tokens") -> "Names":
        """The names for a transformers config; ModelError where Megatron's parameters cannot hold the model. A head of values
        stands where the vocabulary's would."""
        family, dims = architecture_of(hf), dims_of(hf)
        tied = dims.tied and head == "tokens"
        problems = name_problems(standard_config(hf), str(hf.name_or_path))
        if problems:
            raise ModelError(problems)
        sources = list(_Table(family, dims).sources(head))
        order = tuple(tensor for layer in _by_layer(sources) for tensor in _hugging_face_order(layer, family.modules))
        return cls(
            sources={source.parameter: source for source in sources}, order=order, tied=tied, num_experts=dims.num_experts
        )

    def of_model_chunk(self, model_chunk: Any, expert_rank: int, num_expert_ranks: int) -> dict[str, Source]:
        """The source of each parameter of this model chunk, by name; ModelError for one that files have nothing for."""
        first_expert = self.num_experts // num_expert_ranks * expert_rank
        layers = [layer.layer_number - 1 for layer in model_chunk.decoder.layers]
        mine = [name for name, _ in model_chunk.named_parameters() if name.startswith(ADAPTERS) == self.of_adapters]
        found = {name: self._global_name(name, layers, first_expert) for name in mine}
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


def name_problems(standard: Mapping[str, Any], path: str) -> list[Problem]:
    """Why Megatron's parameters cannot hold the model whose config.json, at `path`, has this content under Llama's keys."""
    remedy = "Take another trainer for this model"
    activation = standard.get("hidden_act", "silu")
    problems = [
        Problem(path=path, found=f"{key} = true", expected=f"false: {where} has no bias in Megatron's layers", remedy=remedy)
        for key, where in (("attention_bias", "the output of attention"), ("mlp_bias", "the MLP"))
        if standard.get(key)
    ]
    if activation != "silu":
        problems.append(Problem(path=path, found=f'hidden_act = "{activation}"', expected='"silu"', remedy=remedy))
    return problems


def _unknown(names: Sequence[str]) -> Problem:
    return Problem(
        path="trainer.megatron.transformer",
        found=f"parameters {listed(names)}",
        expected="those that Hugging Face's files have tensors for",
        remedy="Leave out what adds them",
    )


@frozen
class _Table:
    """Makes the sources of all parameters of a model, in the order of its layers."""

    family: Architecture
    dims: ModelDims

    def sources(self, head: Head) -> Iterator[Source]:
        """The embedding's, each layer's, the last norm's, and the head's where it has a weight of its own."""
        dims, modules = self.dims, self.family.modules
        table = (dims.vocab_size, dims.hidden_size)
        yield _source(EMBEDDING, HfTensor(name=f"{modules.embedding}.weight", shape=table, tp_dim=0))
        for layer, has_experts in enumerate(dims.has_experts):
            yield from self._attention(layer)
            yield from self._experts(layer) if has_experts else self._mlp(layer)
            for ours, theirs in (("input", modules.input_norm), ("pre_mlp", modules.mlp_norm)):
                yield self._in_layer(layer, f"{ours}_layernorm.weight", theirs, (dims.hidden_size,))
        yield _source("decoder.final_layernorm.weight", HfTensor(name=f"{modules.norm}.weight", shape=(dims.hidden_size,)))
        if head == "value":
            yield _source(OUTPUT, HfTensor(name=VALUE_HEAD_WEIGHT, shape=(1, dims.hidden_size)))
        elif not dims.tied:
            yield _source(OUTPUT, HfTensor(name=f"{modules.head}.weight", shape=table, tp_dim=0))

    def _attention(self, layer: int) -> Iterator[Source]:
        dims, modules = self.dims, self.family.modules
        num_rows, num_kv_rows = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        rows = {modules.query: num_rows, modules.key: num_kv_rows, modules.value: num_kv_rows}
        columns = {"weight": (dims.hidden_size,)} | ({"bias": ()} if self.family.has_qkv_biases else {})
        for kind, width in columns.items():
            yield Source(
                parameter=f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}",
                tensors=tuple(
                    HfTensor(name=f"{modules.layers}.{layer}.{name}.{kind}", shape=(num, *width), tp_dim=0)
                    for name, num in rows.items()
                ),
                groups=dims.num_kv_heads,
                layer=layer,
            )
        shape = (dims.hidden_size, num_rows)
        yield self._in_layer(layer, "self_attention.linear_proj.weight", modules.output, shape, tp_dim=1)
        if self.family.has_qk_norms:
            for ours, theirs in (("q", modules.query_norm), ("k", modules.key_norm)):
                yield self._in_layer(layer, f"self_attention.{ours}_layernorm.weight", theirs, (dims.head_dim,))

    def _mlp(self, layer: int) -> Iterator[Source]:
        name, width = self.family.modules.mlp, self.dims.intermediate_size
        yield self._gate_and_up(layer, "mlp.linear_fc1.weight", name, width)
        down, shape = f"{name}.{self.family.modules.down}", (self.dims.hidden_size, width)
        yield self._in_layer(layer, "mlp.linear_fc2.weight", down, shape, tp_dim=1)

    def _experts(self, layer: int) -> Iterator[Source]:
        dims, modules = self.dims, self.family.modules
        for expert in range(dims.num_experts):
            name, width = f"{modules.experts}.{expert}", dims.moe_intermediate_size
            yield self._gate_and_up(layer, _expert_name(expert, "linear_fc1"), name, width, expert)
            down = HfTensor(
                name=f"{modules.layers}.{layer}.{name}.{modules.down}.weight",
                shape=(dims.hidden_size, width),
                tp_dim=1,
                fused=(f"{modules.layers}.{layer}.{modules.experts}.down_proj", expert, 0),
            )
            parameter = f"decoder.layers.{layer}.{_expert_name(expert, 'linear_fc2')}"
            yield Source(parameter=parameter, tensors=(down,), layer=layer, expert=expert)
        yield self._in_layer(layer, "mlp.router.weight", modules.router, (dims.num_experts, dims.hidden_size))

    def _gate_and_up(self, layer: int, parameter: str, name: str, width: int, expert: int | None = None) -> Source:
        modules = self.family.modules
        fused = f"{modules.layers}.{layer}.{modules.experts}.gate_up_proj"
        return Source(
            parameter=f"decoder.layers.{layer}.{parameter}",
            tensors=tuple(
                HfTensor(
                    name=f"{modules.layers}.{layer}.{name}.{part}.weight",
                    shape=(width, self.dims.hidden_size),
                    tp_dim=0,
                    fused=None if expert is None else (fused, expert, index * width),
                )
                for index, part in enumerate((modules.gate, modules.up))
            ),
            layer=layer,
            expert=expert,
        )

    def _in_layer(
        self, layer: int, parameter: str, name: str, shape: tuple[int, ...], tp_dim: Literal[0, 1] | None = None
    ) -> Source:
        tensor = HfTensor(name=f"{self.family.modules.layers}.{layer}.{name}.weight", shape=shape, tp_dim=tp_dim)
        return Source(parameter=f"decoder.layers.{layer}.{parameter}", tensors=(tensor,), layer=layer)


def _source(parameter: str, tensor: HfTensor) -> Source:
    return Source(parameter=parameter, tensors=(tensor,))


def _expert_name(expert: int, linear: str) -> str:
    return f"mlp.experts.local_experts.{expert}.{linear}.weight"


def _by_layer(sources: Sequence[Source]) -> Iterator[list[Source]]:
    for _, layer in groupby(sources, key=lambda source: source.layer):
        yield list(layer)


def _hugging_face_order(layer: Sequence[Source], modules: ModuleNames) -> list[HfTensor]:
    """Queries before keys, with their biases; all experts' gates before their other columns."""
    attention = (modules.query, modules.key, modules.value, modules.output, modules.query_norm, modules.key_norm)
    roles = [name.rpartition(".")[2] for name in (*attention, modules.gate, modules.up, modules.down)]

    def rank(tensor: HfTensor) -> int:
        role = tensor.name.split(".")[-2]
        return roles.index(role) if role in roles else len(roles)

    return sorted((tensor for source in layer for tensor in source.tensors), key=rank)
