"""A family of decoders: what its config.json, its modules and its layers have of their own."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve, field, frozen

from rlcore.spi.errors import Problem
from rlcore.spi.weights import Head
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.modules import ModuleNames
from rlcore_torchkit.architectures.values import value_problems

ARCHITECTURES = "config.json names it under architectures"
OLD_KINDS = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Kinds of layers by the names that older transformers, down to 5.17, and older files give them."""


@frozen(kw_only=True)
class Architecture:
    """The description of a family of models for trainers and generators; a file that makes one adds the family.

    All families are decoders of one form: RMS norms before grouped-query attention and before a gated MLP or experts, rotary
    embeddings over whole heads, and full causal attention. A family states where it differs from Llama. The name of its entry
    point in the group `rlcore.architectures` is its `model_type`.
    """

    model_type: str
    """As config.json names the family."""
    class_name: str
    """The causal language model's class in transformers, which config.json lists under `architectures`."""
    modules: ModuleNames = ModuleNames()
    aliases: Mapping[str, str] = field(factory=dict)
    """Keys of Llama's config.json that the family calls otherwise, each with the family's key."""
    defaults: Mapping[str, Any] = field(factory=dict)
    """Values, by Llama's keys, that transformers takes where config.json lacks a key that it need not have."""
    has_qkv_biases: bool = False
    """True where queries, keys and values have a bias, and the output of attention has none."""
    has_qk_norms: bool = False
    """True where each head of queries and keys goes through an RMS norm, before it is rotated."""
    has_correction_bias: bool = False
    """True where routers choose by scores with a bias added, which no gradient trains (arXiv:2408.15664)."""
    has_windows: bool = False
    """True where layers may see windows, as config.json lists them; else a model with one is refused."""
    layer_kinds: frozenset[str] = frozenset()
    """Kinds of layers besides "full_attention" that config.json may list."""
    window_key: str = "use_sliding_window"
    """The key of config.json that is neither false nor null where attention sees a window alone."""

    def standard(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The content of config.json, with what `aliases` names under Llama's keys too, and with `defaults`."""
        aliased = {ours: config[theirs] for ours, theirs in self.aliases.items() if theirs in config}
        return {**self.defaults, **aliased, **config}

    def malformed_values(self, config: Mapping[str, Any], path: str) -> list[Problem]:
        """Values in a config.json of this model_type that nothing can be computed with; `path` is the file's."""
        names = {ours: theirs for ours, theirs in self.aliases.items() if ours not in config}
        problems = value_problems(self.standard(config))
        return [
            evolve(problem, path=path, found=f"{names.get(problem.path, problem.path)} = {problem.found}")
            for problem in problems
        ]

    @property
    def classifier_name(self) -> str:
        """The class in transformers of models that end in a linear layer in place of the vocabulary's head."""
        return self.class_name.replace("ForCausalLM", "ForSequenceClassification")

    def is_classifier(self, config: Mapping[str, Any]) -> bool:
        """Return whether a config.json of this model_type describes a classifier."""
        return config.get("architectures") == [self.classifier_name]

    def problems(self, config: Mapping[str, Any], path: str, head: Head = "tokens") -> Iterator[Problem]:
        """Refuse a config.json of this model_type that is not the family's; `path` is the file's. A model of values (`head`)
        may be a classifier with one label, or any language model."""
        if malformed := self.malformed_values(config, path):
            yield from malformed
            return
        classes = config.get("architectures") or ["none"]
        found = classes[0] if isinstance(classes, list) else classes
        key, kinds = (
            self.window_key,
            {OLD_KINDS.get(kind, kind) for kind in config.get("layer_types") or ()} - {"full_attention"},
        )
        window = self.standard(config).get(key)
        if self.has_windows:
            window, kinds = None, kinds - {"sliding_attention"}
        kinds -= self.layer_kinds
        if head == "value" and self.is_classifier(config):
            found = self.class_name
            # transformers takes two labels where the file names none
            if (num_labels := len(config.get("id2label") or "01")) != 1:
                given = f"{self.classifier_name} with {num_labels} labels"
                yield Problem(path=path, found=given, expected="one label (num_labels = 1), or a language model")
        if found != self.class_name:
            expected = f"{self.class_name}, the language model of model_type {self.model_type}"
            yield Problem(path=path, found=f"architecture {found}", expected=expected, remedy=ARCHITECTURES)
        elif window:
            given = f"{key} = {json.dumps(window)}" if key in config else f"no {key}, which stands for {window}"
            remedy = f"Set it to {'false' if window is True else 'null'} if all sequences are short"
            yield Problem(path=path, found=given, expected="full causal attention", remedy=remedy)
        elif kinds:
            given = f"layers of {', '.join(sorted(map(str, kinds)))}"
            yield Problem(path=path, found=given, expected="full_attention in each layer")


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
