"""A family of decoders: what its config.json, its modules and its layers have of their own."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from rlcore.spi.errors import Problem
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.modules import ModuleNames


@frozen(kw_only=True)
class Architecture:
    """What trainers and generators have to know of a family of models; a file that makes one adds the family.

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
    has_qkv_biases: bool = False
    """Whether queries, keys and values have a bias, and the output of attention has none."""
    has_qk_norms: bool = False
    """Whether each head of queries and keys goes through an RMS norm, before it is rotated."""
    window_key: str = "use_sliding_window"
    """The key of config.json that is neither false nor null where attention sees a window alone."""

    def standard(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The content of config.json, with what `aliases` names under Llama's keys too."""
        return {ours: config.get(theirs) for ours, theirs in self.aliases.items()} | dict(config)

    def dims(self, config: Mapping[str, Any]) -> ModelDims | None:
        """The sizes in config.json; None where it lacks some that every decoder has."""
        return ModelDims.of(self.standard(config))

    def problems(self, config: Mapping[str, Any], path: str) -> Iterator[Problem]:
        """What in a config.json of this model_type makes the model another than the family's; `path` is the file's."""
        classes = config.get("architectures") or ["none"]
        found = classes[0] if isinstance(classes, list) else classes
        window, kinds = config.get(self.window_key), set(config.get("layer_types") or ()) - {"full_attention"}
        if found != self.class_name:
            yield Problem(
                path=path,
                found=f"architecture {found}",
                expected=f"{self.class_name}, the language model of model_type {self.model_type}",
            )
        elif window:
            remedy = f"Set it to {'false' if window is True else 'null'} if all sequences are short"
            yield Problem(
                path=path,
                found=f"{self.window_key} = {json.dumps(window)}",
                expected="full causal attention",
                remedy=remedy,
            )
        elif kinds:
            yield Problem(
                path=path, found=f"layers of {', '.join(sorted(map(str, kinds)))}", expected="full_attention in each layer"
            )
