"""DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5: DeepSeek-V3's layers with attention to the keys that an indexer chooses."""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import asdict, frozen

from rlcore.schema.constraints import Count, Positive
from rlcore.spi import Problem
from rlcore_megatron.families.deepseek_v3 import TYPES, DeepseekV3, deepseek_v3
from rlcore_megatron.families.family import REMEDY, well_formed
from rlcore_megatron.families.weight_source import Source
from rlcore_megatron.families.weight_table import LatentWeightTable

INDEXER = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
OWN_TYPES: Mapping[str, Any] = {
    **dict.fromkeys((*INDEXER, "num_hidden_layers"), Positive),
    **dict.fromkeys(("mlp_layer_types", "indexer_types"), tuple[str, ...]),
    "index_topk_pattern": str,
    "index_topk_freq": Count,
    "index_skip_topk_offset": Count,
}
DEEPSEEK = {"num_attention_heads": 128, "max_position_embeddings": 163840}
GLM = {
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "max_position_embeddings": 202752,
}
"""GLM-5's, as transformers takes them where config.json lacks a key."""


class SparseLatentTable(LatentWeightTable):
    """Map a layer's weights; each tensor rank has the indexer's whole."""

    def attention(self, layer: int) -> Iterator[Source]:
        """Yield the sources of attention's weights and then the indexer's, in the order of transformers' module."""
        yield from super().attention(layer)
        dims, latent, indexer = self.dims, self.dims.latent, self.dims.indexer
        assert latent is not None
        assert latent.query_rank is not None
        assert indexer is not None
        if not indexer.layers[layer]:
            return
        shapes: Mapping[str, tuple[int, ...]] = {
            "wq_b.weight": (indexer.num_heads * indexer.width, latent.query_rank),
            "wk.weight": (indexer.width, dims.hidden_size),
            "k_norm.weight": (indexer.width,),
            "k_norm.bias": (indexer.width,),
            "weights_proj.weight": (indexer.num_heads, dims.hidden_size),
        }
        for name, shape in shapes.items():
            whole = f"{self.family.modules.attention}.indexer"
            yield self.in_layer(layer, f"self_attention.indexer.{name}", whole, shape, suffix=f".{name}")


@frozen(kw_only=True)
class SparseLatent(DeepseekV3):
    """The family as the model of one config.json has it."""

    def layer_problems(self, standard: Mapping[str, Any], path: str) -> Iterator[Problem]:
        """Yield what DeepSeek-V3 refuses, and indexers that have nothing to read."""
        yield from super().layer_problems(standard, path)
        if standard.get("q_lora_rank") is None:
            yield Problem(
                path=path, found="q_lora_rank = null", expected="a number: indexers read narrow queries", remedy=REMEDY
            )
        if len(self.indexed) != standard["num_hidden_layers"] or not self.indexed[0]:
            expected = f"{standard['num_hidden_layers']} layers, of which the first is full"
            yield Problem(path=path, found=f"indexer_types of {len(self.indexed)} layers", expected=expected)


def deepseek_v32(config: Mapping[str, Any]) -> DeepseekV3:
    """DeepSeek-V3.2, with an indexer in each layer."""
    count = well_formed(config, OWN_TYPES, {"num_hidden_layers": 61})["num_hidden_layers"]
    return _family("deepseek_v32", "DeepseekV32ForCausalLM", config, DEEPSEEK, (True,) * count)


def glm_moe_dsa(config: Mapping[str, Any]) -> DeepseekV3:
    """GLM-5, where layers may take the keys that one before them has chosen."""
    schedule = {"num_hidden_layers": 78, "index_topk_freq": 1, "index_skip_topk_offset": 2}
    own = well_formed(config, OWN_TYPES, {**schedule, "indexer_types": None, "index_topk_pattern": None})
    every, offset = max(own["index_topk_freq"], 1), own["index_skip_topk_offset"]
    indexed = tuple(max(n - offset + 1, 0) % every == 0 for n in range(own["num_hidden_layers"]))
    if own["index_topk_pattern"]:
        indexed = tuple(letter == "F" for letter in own["index_topk_pattern"])
    if own["indexer_types"]:
        indexed = tuple(kind == "full" for kind in own["indexer_types"])
    return _family("glm_moe_dsa", "GlmMoeDsaForCausalLM", config, GLM, indexed)


def _family(
    name: str, class_name: str, config: Mapping[str, Any], defaults: Mapping[str, Any], indexed: tuple[bool, ...]
) -> DeepseekV3:
    """DeepSeek-V3's family with other defaults, and indexers in these layers."""
    base = deepseek_v3({**defaults, **{key: value for key, value in config.items() if value is not None}})
    own = well_formed(
        config, OWN_TYPES, {**INDEXER, "mlp_layer_types": None, **{k: v for k, v in defaults.items() if k in INDEXER}}
    )
    kinds = own["mlp_layer_types"]
    dense = {} if kinds is None else {"mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind == "dense"]}
    fields = asdict(base, recurse=False) | {
        "model_type": name,
        "class_name": class_name,
        "table": SparseLatentTable,
        "types": {**TYPES, **OWN_TYPES},
        "defaults": {
            **base.defaults,
            "num_attention_heads": defaults["num_attention_heads"],
            "num_key_value_heads": defaults["num_attention_heads"],
            "max_position_embeddings": defaults["max_position_embeddings"],
        },
        "derived": {
            **base.derived,
            **dense,
            **{key: own[key] for key in INDEXER},
            "indexed_layers": list(indexed),
        },
        "has_multi_token_head": False,
        "layer_kinds": frozenset({"indexed_attention"}),
        "indexed": indexed,
        "has_interleaved_indexers": name == "glm_moe_dsa",
    }
    return SparseLatent(**fields)
