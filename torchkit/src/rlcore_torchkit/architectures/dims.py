"""The sizes of a model that layouts divide and memory is made of, read from its config.json."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from attrs import evolve, frozen

ESSENTIAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
DELTA_KEYS = {
    "num_key_heads": "num_key_heads",
    "num_value_heads": "num_value_heads",
    "key_width": "key_head_dim",
    "value_width": "value_head_dim",
    "kernel": "conv_kernel_dim",
}
"""Sizes of gated delta nets, and the ends of their keys in config.json."""


@frozen(kw_only=True)
class LatentDims:
    """The sizes of multi-latent attention (arXiv:2405.04434, section 2.1)."""

    query_rank: int | None
    """The width that queries are made from; None where that is the hidden size."""
    key_rank: int
    """The width that keys and values are made from."""
    plain_width: int
    """The part of each head of queries and keys that is not rotated."""
    rotary_width: int
    """The part that is, which all heads of keys have in common."""
    value_width: int

    @property
    def key_width(self) -> int:
        """The width of a head of queries or keys."""
        return self.plain_width + self.rotary_width

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "LatentDims | None":
        """The sizes in the content of config.json; None where it names none."""
        if not model.get("kv_lora_rank"):
            return None
        return cls(
            query_rank=model.get("q_lora_rank"),
            key_rank=model["kv_lora_rank"],
            plain_width=model["qk_nope_head_dim"],
            rotary_width=model["qk_rope_head_dim"],
            value_width=model["v_head_dim"],
        )


@frozen(kw_only=True)
class DeltaDims:
    """The sizes of a gated delta net (arXiv:2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int
    kernel: int
    """The number of tokens that its convolution sees."""

    @property
    def channels(self) -> int:
        """The width of queries, keys and values together, which the convolution goes through."""
        return 2 * self.num_key_heads * self.key_width + self.num_value_heads * self.value_width

    @property
    def rows(self) -> int:
        """The width of all that the input is projected to: besides the channels gates, and two rates of each head."""
        return self.channels + self.num_value_heads * (self.value_width + 2)

    def num_parameters(self, hidden_size: int) -> int:
        """Count the parameters of the projections and of the convolution."""
        return hidden_size * (self.rows + self.num_value_heads * self.value_width) + self.channels * self.kernel

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "DeltaDims | None":
        """The sizes in the content of config.json; None where one is missing."""
        sizes: dict[str, Any] = {ours: model.get(f"linear_{theirs}") for ours, theirs in DELTA_KEYS.items()}
        return cls(**sizes) if all(type(size) is int for size in sizes.values()) else None


@frozen(kw_only=True)
class IndexerDims:
    """The sizes of indexers, which choose the keys of each query (arXiv:2512.02556)."""

    num_chosen: int
    num_heads: int
    width: int
    layers: tuple[bool, ...]
    """Which layers have one."""

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "IndexerDims | None":
        """The sizes in the content of config.json; None where it names no layers with indexers."""
        if not model.get("indexed_layers"):
            return None
        return cls(
            num_chosen=model["index_topk"],
            num_heads=model["index_n_heads"],
            width=model["index_head_dim"],
            layers=tuple(model["indexed_layers"]),
        )


@frozen(kw_only=True)
class ModelDims:
    """A decoder's sizes, whatever its architecture calls them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """The width of the MLP of a layer without experts."""
    vocab_size: int
    tied: bool
    """True where the output layer's weight is the embedding's."""
    num_experts: int
    """Experts of a mixture-of-experts layer; 0 in a model without any."""
    num_experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    """The width of the expert that every token of a mixture-of-experts layer goes through; 0 where there is none."""
    has_experts: tuple[bool, ...]
    """[num_layers] which layers have experts; the others have an MLP."""
    latent: LatentDims | None = None
    """In a model with multi-latent attention; `num_kv_heads` and `head_dim` then say nothing."""
    indexer: IndexerDims | None = None
    delta: DeltaDims | None = None
    has_delta: tuple[bool, ...] = ()
    """[num_layers] which layers have a gated delta net in place of attention; empty in a model without any."""
    has_output_gates: bool = False
    """True where queries come with as many gates, by which attention's outputs are multiplied."""
    has_wide_norms: bool = False
    """True where the norms of queries and keys are over all heads together."""
    has_shared_gate: bool = False
    """True where the expert of all tokens has a gate, one value for each token."""

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "ModelDims | None":
        """The sizes in the content of config.json, under Llama's keys and of the right types; None where an essential one is
        missing."""
        if any(not model.get(key) for key in ESSENTIAL):
            return None
        heads, layers, experts = model["num_attention_heads"], model["num_hidden_layers"], model.get("num_experts") or 0
        return cls(
            hidden_size=model["hidden_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=model.get("num_key_value_heads") or heads,
            head_dim=model.get("head_dim") or model["hidden_size"] // heads,
            intermediate_size=model["intermediate_size"],
            vocab_size=model["vocab_size"],
            tied=bool(model.get("tie_word_embeddings")),
            num_experts=experts,
            num_experts_per_token=model.get("num_experts_per_tok") or 0,
            moe_intermediate_size=model.get("moe_intermediate_size") or 0,
            shared_intermediate_size=model.get("shared_expert_intermediate_size") or 0,
            has_experts=tuple(expert_layers(model)),
            latent=LatentDims.of(model),
            indexer=IndexerDims.of(model),
            **_delta(model),
            has_output_gates=bool(model.get("attn_output_gate")),
            has_wide_norms=bool(model.get("wide_qk_norms")),
            has_shared_gate=bool(model.get("shared_expert_gate")),
        )

    @cached_property  # a plan asks millions of times
    def num_moe_layers(self) -> int:
        return sum(self.has_experts)

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers

    def without_ends(self, at_start: int, at_end: int) -> "ModelDims":
        """The sizes without so many layers at the start and at the end; of no layers where these are all."""
        within = slice(at_start, max(at_start, self.num_layers - at_end))
        kept = self.has_experts[within]
        return evolve(self, num_layers=len(kept), has_experts=kept, has_delta=self.has_delta[within])


def _delta(model: Mapping[str, Any]) -> dict[str, Any]:
    kinds = model.get("layer_types") or ()
    delta = DeltaDims.of(model) if "linear_attention" in kinds else None
    return {} if delta is None else {"delta": delta, "has_delta": tuple(kind == "linear_attention" for kind in kinds)}


def expert_layers(model: Mapping[str, Any]) -> list[bool]:
    """[layers] which of the layers have experts (transformers' `mlp_only_layers` and `decoder_sparse_step`)."""
    if not model.get("num_experts"):
        return [False] * model["num_hidden_layers"]
    dense, step = model.get("mlp_only_layers") or (), model.get("decoder_sparse_step") or 1
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(model["num_hidden_layers"])]
