"""The description of a family for Megatron: its parameters, values of TransformerConfig, and what its layers cannot be."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve, field, fields, frozen

from rlcore.spi import Head, Problem
from rlcore_megatron.families.weight_table import WeightTable
from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.values import value_problems

REMEDY = "Take another trainer for this model"
SILU = {"hidden_act": ("silu", "the activation of gated MLPs")}
NO_MLP_BIAS = {"mlp_bias": (False, "the MLP has no bias in Megatron's layers")}
NO_BIASES = {"attention_bias": (False, "the output of attention has no bias in Megatron's layers"), **NO_MLP_BIAS}


@frozen(kw_only=True)
class MegatronFamily(Architecture):
    """A family, as the model of one config.json has it. The defaults are for families that are described for all trainers."""

    table: type[WeightTable] = WeightTable
    """Makes the sources of its parameters."""
    transformer: Mapping[str, Any] = field(factory=dict)
    """Values of Megatron's TransformerConfig beside those of sizes and of the layout."""
    derived: Mapping[str, Any] = field(factory=dict)
    """Values by the keys that sizes are read from, worked out from the family's own keys of config.json."""
    types: Mapping[str, Any] = field(factory=dict)
    """The types of the family's own keys of config.json, as torchkit's `architectures.values` has those of Llama's."""
    required: Mapping[str, tuple[Any, str]] = field(factory=lambda: {**NO_BIASES, **SILU})
    """Keys of config.json of which Megatron computes one value alone: that value, and what it is about. A config.json without
    such a key means that value."""
    windows: tuple[int | None, ...] = ()
    """The number of tokens that each layer's queries see, their own and those before it; None for all. Empty where all layers
    see all."""
    has_sinks: bool = False
    """True where each head has a score of nothing, which takes its share of the softmax (arXiv:2309.17453; gpt-oss)."""
    has_all_biases: bool = False
    """True where all linear layers in the decoder's layers have biases, experts and routers too."""
    swish_beta: float = 1.0
    """The gate of MLPs is x · sigmoid(beta · x)."""
    has_gelu_gates: bool = False
    """True where it is GELU instead, in the approximation by tanh."""
    has_output_norms: bool = False
    """True where there are norms behind attention and MLP too, before the residual is added."""
    scales_embeddings: bool = False
    """True where embeddings are multiplied by the root of the hidden size, rounded to the weights' dtype."""
    has_multi_token_head: bool = False
    """True where files may have one layer more than the decoder: a head that predicts the token after the next."""
    score_width: float | None = None
    """Products of queries and keys are divided by its root; None for the width of a head."""
    score_cap: float | None = None
    """Scores s are cap · tanh(s / cap)."""
    logit_cap: float | None = None
    """Logits likewise, before a temperature divides them."""
    rope: Mapping[str, Any] | None = None
    """The table of rotary embedding, where it is not config.json's `rope_parameters`."""
    local_theta: float | None = None
    """The base of rotary embedding in layers that see windows, whose frequencies are not scaled; None for that of all."""
    rotary: tuple[str, ...] = ("default", "linear", "llama3")
    """Kinds of rotary embedding that it may have; of the defaults the angles alone carry the scaling."""
    indexed: tuple[bool, ...] = ()
    """Which layers have an indexer that chooses keys; each other layer takes those of the last one before it. Empty where all
    queries see all keys."""
    has_interleaved_indexers: bool = False
    """True where indexers rotate neighbouring elements, and not halves."""
    reads_images: bool = False
    """True where a vision tower reads images, whose features take the places of placeholders' embeddings."""
    rotary_sections: tuple[int, ...] = ()
    """The numbers of rotary frequencies for a position's time, height and width; empty where positions are single numbers."""
    has_interleaved_sections: bool = False
    """True where the axes take turns from frequency to frequency, and not one axis follows another."""
    deepstack: tuple[bool, ...] = ()
    """Which layers are followed by an addition of the tower's features; the first ones, or none."""
    vision_parameters: int = 0
    """The number of the tower's parameters, about."""
    other_names: Mapping[str, str] = field(factory=dict)
    """Prefixes of tensors' names in some files, each with the prefix that `table` has for it."""
    is_own: bool = True
    """True where it is no family that is described for all trainers."""

    @classmethod
    def of(cls, family: Architecture) -> "MegatronFamily":
        """The family itself, or one that is described for all trainers with what Megatron has to know."""
        if isinstance(family, MegatronFamily):
            return family
        return cls(**{each.name: getattr(family, each.name) for each in fields(type(family))}, is_own=False)

    def standard(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As for all families, with `derived`."""
        return {**super().standard(config), **self.derived}

    def malformed_values(self, config: Mapping[str, Any], path: str) -> list[Problem]:
        """As for all families, with the family's own keys before the others."""
        own = [
            evolve(problem, path=path, found=f"{problem.path} = {problem.found}")
            for problem in value_problems(config, self.types)
        ]
        return own or super().malformed_values(config, path)

    def layer_problems(self, standard: Mapping[str, Any], path: str) -> Iterator[Problem]:
        """Refuse a model whose config.json, at `path`, says under Llama's keys what Megatron's layers cannot be."""
        kinds = self.windows or standard.get("layer_types") or ()
        if kinds and len(kinds) != standard["num_hidden_layers"]:
            expected = f"{standard['num_hidden_layers']}, as num_hidden_layers says"
            yield Problem(path=path, found=f"layer_types of {len(kinds)} layers", expected=expected)
        for key, (value, reason) in self.required.items():
            found = standard.get(key)
            if found not in (None, value):
                expected = f"{json.dumps(value)}: {reason}"
                yield Problem(path=path, found=f"{key} = {json.dumps(found)}", expected=expected, remedy=REMEDY)

    @property
    def needs_general_attention(self) -> bool:
        """Return whether layers attend otherwise than fused kernels for causal attention do."""
        return bool(self.windows) or self.stores_scores

    @property
    def stores_scores(self) -> bool:
        """Return whether attention keeps all scores, since no kernel of torch computes it."""
        return self.has_sinks or self.score_cap is not None

    def head_problems(self, path: str, head: Head) -> Iterator[Problem]:
        """Refuse a head that Megatron cannot train for the model at `path`."""
        if head == "value" and self.is_own:
            yield Problem(
                path=path,
                found=f"model_type {self.model_type}, for an algorithm that trains a model of values",
                expected="a family that is described for all trainers",
                remedy="Take a model of another family for the critic or the reward model",
            )

    @property
    def has_delta_nets(self) -> bool:
        """Return whether layers may have a gated delta net in place of attention."""
        return "linear_attention" in self.layer_kinds

    def adapter_problems(self) -> Iterator[Problem]:
        """Refuse adapters in a family with projections beside those of attention."""
        if self.layer_kinds:
            expected = f"no such section: layers of {', '.join(self.layer_kinds)} have projections without adapters"
            yield Problem(
                path="lora",
                found=f"the section, with model_type {self.model_type}",
                expected=expected,
                remedy="Leave it out, or take another trainer for this model",
            )


def well_formed(config: Mapping[str, Any], types: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a family's own keys to derive others from, with defaults for missing and malformed ones."""
    bad = {problem.path.partition(".")[0] for problem in value_problems(config, types)}
    return {key: value if key in bad or config.get(key) is None else config[key] for key, value in defaults.items()}
