"""Gemma 2 (arXiv:2408.00118) and the language models of Gemma 3 (arXiv:2503.19786): norms on both sides of attention and MLP,
windows in most layers, and soft caps of scores and logits (Gemma 2) or norms of queries and keys (Gemma 3)."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from attrs import frozen

from rlcore.schema.constraints import Positive, above_at_most
from rlcore.spi import Problem
from rlcore_megatron.families.family import NO_BIASES, REMEDY, MegatronFamily, well_formed
from rlcore_megatron.families.weight_source import Source
from rlcore_megatron.families.weight_table import WeightTable
from rlcore_torchkit.architectures.modules import ModuleNames

NUMBER = Annotated[float, above_at_most(0, 2**31)]
ROPE = {"rope_type": str, "type": str, "rope_theta": NUMBER, "factor": NUMBER}
KINDS = dict.fromkeys(("full_attention", "sliding_attention"), ROPE)
TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "sliding_window", "sliding_window_pattern"), Positive),
    "layer_types": tuple[str, ...],
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), NUMBER),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), NUMBER),
    **dict.fromkeys(("use_bidirectional_attention", "attention_bias"), bool),
}
DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 26,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "layer_types": None,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_parameters": {},
    "rope_scaling": {},
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Gemma 2's, where config.json lacks the key; null is none."""
POST_ATTENTION, POST_MLP = "post_attention_layernorm", "post_feedforward_layernorm"


class GemmaTable(WeightTable):
    """With the norms behind attention and MLP."""

    def norms(self, layer: int) -> Iterator[Source]:
        """All four, in the order of transformers' module."""
        modules, width = self.family.modules, (self.dims.hidden_size,)
        yield self.in_layer(layer, "input_layernorm.weight", modules.input_norm, width)
        yield self.in_layer(layer, "self_attn_bda.weight", POST_ATTENTION, width)
        yield self.in_layer(layer, "pre_mlp_layernorm.weight", modules.mlp_norm, width)
        yield self.in_layer(layer, "mlp_bda.weight", POST_MLP, width)


@frozen(kw_only=True)
class Gemma3(MegatronFamily):
    """Gemma 3, as the model of one config.json has it."""

    def layer_problems(self, standard: Mapping[str, Any], path: str) -> Iterator[Problem]:
        """As for all families, and a scaled rotation in layers that see windows."""
        yield from super().layer_problems(standard, path)
        rope = well_formed(standard, {"rope_parameters": KINDS}, DEFAULTS)["rope_parameters"].get("sliding_attention") or {}
        if (kind := rope.get("rope_type", "default")) != "default":
            found, expected = f'rope_type = "{kind}" of sliding_attention', "default"
            yield Problem(path=path, found=found, expected=expected, remedy=REMEDY)


def gemma2(config: Mapping[str, Any]) -> MegatronFamily:
    """Gemma 2."""
    own, types = well_formed(config, TYPES, DEFAULTS), {**TYPES, "rope_parameters": ROPE}
    kinds = own["layer_types"] or [("sliding_attention", "full_attention")[n % 2] for n in range(own["num_hidden_layers"])]
    given = well_formed(config, TYPES, CAPS)
    caps = {key: None if config.get(key, default) is None else given[key] for key, default in CAPS.items()}
    return MegatronFamily(
        **_shared("gemma2", "Gemma2ForCausalLM", own, kinds, max_position_embeddings=8192),
        types=types,
        required=_required(),
        score_cap=caps["attn_logit_softcapping"],
        logit_cap=caps["final_logit_softcapping"],
    )


def gemma3_text(config: Mapping[str, Any]) -> MegatronFamily:
    """A language model of Gemma 3, whose layers that see windows are rotated by a base of their own."""
    types = {**TYPES, "rope_parameters": KINDS, "rope_scaling": ROPE}
    own = well_formed(config, types, DEFAULTS)
    pattern, count = own["sliding_window_pattern"], own["num_hidden_layers"]
    kinds = own["layer_types"] or ["sliding_attention" if n % pattern else "full_attention" for n in range(1, count + 1)]
    ropes = {kind: own["rope_parameters"].get(kind) or {} for kind in KINDS}
    return Gemma3(
        **_shared("gemma3_text", "Gemma3ForCausalLM", own, kinds, max_position_embeddings=131072),
        types=types,
        required={**_required(), "attn_logit_softcapping": (None, "transformers does not cap Gemma 3's scores")},
        has_qk_norms=True,
        logit_cap=well_formed(config, types, {"final_logit_softcapping": None})["final_logit_softcapping"],
        rope={"rope_theta": own["rope_theta"], **own["rope_scaling"], **ropes["full_attention"]},
        local_theta=ropes["sliding_attention"].get("rope_theta") or own["rope_local_base_freq"],
    )


def _required() -> dict[str, tuple[Any, str]]:
    return {
        **NO_BIASES,
        "hidden_activation": ("gelu_pytorch_tanh", "the activation of gated MLPs"),
        "use_bidirectional_attention": (False, "tokens see none behind them"),
    }


def _shared(name: str, class_name: str, own: Mapping[str, Any], kinds: list[str], **defaults: Any) -> dict[str, Any]:
    """Return the fields that both have in common, for layers of these `kinds`; the sizes in `defaults` are one's own."""
    return {
        "model_type": name,
        "class_name": class_name,
        "modules": ModuleNames(mlp_norm="pre_feedforward_layernorm"),
        "table": GemmaTable,
        "defaults": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, **defaults},
        "has_windows": True,
        "windows": tuple(own["sliding_window"] if kind == "sliding_attention" else None for kind in kinds),
        "transformer": {"layernorm_zero_centered_gamma": True},
        "score_width": own["query_pre_attn_scalar"],
        "scales_embeddings": True,
        "has_output_norms": True,
        "has_gelu_gates": True,
    }
