"""Maps each of Megatron's parameters to tensors of Hugging Face's files; imports no torch.

Our own tables rather than a bridge package: families have few forms of a layer, loading has to read slices, and what such
packages demand of transformers' version would bind every other plugin of an installation.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from attrs import frozen

from rlcore.schema.suggestions import listed
from rlcore.spi import Head, ModelError, Problem
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.families.models import architecture_of, dims_of, standard_config
from rlcore_megatron.families.vision_weights import vision_sources
from rlcore_megatron.families.weight_source import EMBEDDING, MULTI_TOKEN_HEAD, OUTPUT, HfTensor, Source
from rlcore_megatron.families.weight_table import expert_name

ADAPTERS = "adapters."
"""Prefix of the names of adapters' parameters."""
SHARED = (EMBEDDING, OUTPUT)
"""Parameters of the trunk that the files have again among those of the multi-token head."""
_LAYER = re.compile(r"(?:decoder\.layers\.(\d+)|multi_token_head\.transformer_layer)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_SINGLE_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
"""TransformerEngine keeps the weight of a norm in the linear layer after it."""


@frozen(kw_only=True, eq=False)
class Names:
    """The whole model's parameters and tensors."""

    sources: Mapping[str, Source]
    """The source of each parameter, by Source.parameter."""
    order: tuple[HfTensor, ...]
    """All tensors, as `save_pretrained` and the other trainers name and order them."""
    tied: bool
    num_experts: int
    prefix: str = ""
    """Prefix of parameters' names: ADAPTERS, MULTI_TOKEN_HEAD, or nothing for the trunk's."""

    @classmethod
    def of(cls, hf: Any, head: Head = "tokens") -> "Names":
        """The names for a transformers config; ModelError where Megatron's parameters cannot hold the model. A head of values
        stands where the vocabulary's would."""
        family, dims = architecture_of(hf), dims_of(hf)
        tied = dims.tied and head == "tokens"
        path = str(hf.name_or_path)
        if problems := [*family.layer_problems(standard_config(hf), path), *family.head_problems(path, head)]:
            raise ModelError(problems)
        sources = [*(vision_sources(hf) if family.reads_images else ()), *family.table(family, dims).sources(head)]
        order = tuple(tensor for layer in _by_layer(sources) for tensor in _hugging_face_order(layer, family))
        return cls(
            sources={source.parameter: source for source in sources}, order=order, tied=tied, num_experts=dims.num_experts
        )

    @classmethod
    def of_multi_token_head(cls, hf: Any) -> "Names":
        """Return the names of the multi-token head of a model that has one, with the copies of embedding and output layer in
        its files."""
        family, dims = architecture_of(hf), dims_of(hf)
        sources = list(family.table(family, dims).multi_token_head())
        return cls(
            sources={source.parameter: source for source in sources},
            order=tuple(_hugging_face_order(sources, family)),
            tied=False,
            num_experts=dims.num_experts,
            prefix=MULTI_TOKEN_HEAD,
        )

    def of_model_chunk(self, model_chunk: Any, expert_rank: int, num_expert_ranks: int) -> dict[str, Source]:
        """The source of each parameter of this model chunk, by name; ModelError for one that files have nothing for."""
        first_expert = self.num_experts // num_expert_ranks * expert_rank
        layers = [layer.layer_number - 1 for layer in model_chunk.decoder.layers]
        mine = [name for name, _ in model_chunk.named_parameters() if self._has(name)]
        found = {name: self._global_name(name, layers, first_expert) for name in mine}
        unknown = [name for name, whole in found.items() if whole not in self.sources]
        if unknown:
            raise ModelError([_unknown(unknown)])
        return {name: self.sources[whole] for name, whole in found.items()}

    def _has(self, name: str) -> bool:
        prefix = next((prefix for prefix in (ADAPTERS, MULTI_TOKEN_HEAD) if name.startswith(prefix)), "")
        return prefix == self.prefix or (self.prefix == MULTI_TOKEN_HEAD and name in SHARED)

    def _global_name(self, name: str, layers: Sequence[int], first_expert: int) -> str:
        if self.tied and name == OUTPUT:
            return EMBEDDING  # the copy on the last stage
        match = _LAYER.fullmatch(name)
        if match is None:
            return name
        within = FUSED_NORMS.get(match[2], match[2])
        if grouped := _GROUPED_EXPERT.fullmatch(within):
            within = expert_name(first_expert + int(grouped[3]), grouped[1], grouped[2])
        elif single := _SINGLE_EXPERT.fullmatch(within):
            within = expert_name(first_expert + int(single[1]), single[2], single[3])
        return (
            f"{MULTI_TOKEN_HEAD}transformer_layer.{within}"
            if match[1] is None
            else f"decoder.layers.{layers[int(match[1])]}.{within}"
        )


def _unknown(names: Sequence[str]) -> Problem:
    return Problem(
        path="trainer.megatron.transformer",
        found=f"parameters {listed(names)}",
        expected="those that Hugging Face's files have tensors for",
        remedy="Leave out what adds them",
    )


def _by_layer(sources: Sequence[Source]) -> Iterator[list[Source]]:
    for _, layer in groupby(sources, key=lambda source: source.layer):
        yield list(layer)


def _hugging_face_order(layer: Sequence[Source], family: MegatronFamily) -> list[HfTensor]:
    """Sort queries before keys, with their biases, unless attention is listed in order; all experts' gates before other
    columns."""
    modules = family.modules
    attention = (modules.query, modules.key, modules.value, modules.output, modules.query_norm, modules.key_norm)
    roles = [name.rpartition(".")[2] for name in (*attention, modules.gate, modules.up, modules.down)]

    def rank(tensor: HfTensor) -> int:
        role = tensor.name.split(".")[-2]
        if any(f".{name}." in tensor.name for name in family.table.in_order):
            return -1
        if any(f".{name}." in tensor.name for name in (modules.shared_expert, modules.shared_gate)):  # behind the router
            return len(roles)
        return roles.index(role) if role in roles else len(roles)

    return sorted((tensor for source in layer for tensor in source.tensors), key=rank)
