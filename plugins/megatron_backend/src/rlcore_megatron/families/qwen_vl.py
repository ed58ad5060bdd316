"""Qwen2-VL, Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631): Qwen's decoders, which read images besides text.

Their vision towers are transformers' own (`modules/vision.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from rlcore.spi import Head, Problem
from rlcore_megatron.families.family import REMEDY, MegatronFamily
from rlcore_torchkit.architectures.decoders import IMAGE_MODELS
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.modules import ModuleNames
from rlcore_torchkit.transformers_import import import_transformers

NESTED = ModuleNames(
    embedding="model.language_model.embed_tokens",
    layers="model.language_model.layers",
    norm="model.language_model.norm",
    rotary="model.language_model.rotary_emb",
)
"""Names in files that keep the language model beside the tower."""
OTHER_NAMES = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Prefixes in files of Qwen2-VL and Qwen2.5-VL whose writer keeps the names of transformers' modules."""
NUM_AXES = 3
"""Time, height and width."""


@frozen(kw_only=True)
class ImageFamily(MegatronFamily):
    """A family of models of text and images, as the model of one config.json has it."""

    num_features: int = 0
    """The number of the tower's layers whose features the language model's layers add."""

    def standard(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the standard values of the language model, whose keys stand beside the whole model's."""
        return super().standard(_flat(config))

    @property
    def classifier_name(self) -> str:
        """The class of transformers for reward models of this family."""
        return self.class_name.replace("ForConditionalGeneration", "ForSequenceClassification")

    def malformed_values(self, config: Mapping[str, Any], path: str) -> list[Problem]:
        """Return the language model's values that are of another type than expected."""
        return super().malformed_values(_flat(config), path)

    def problems(self, config: Mapping[str, Any], path: str, head: Head = "tokens") -> Iterator[Problem]:
        """Yield the language model's values that Megatron cannot compute."""
        yield from super().problems(_flat(config), path, head)

    def layer_problems(self, standard: Mapping[str, Any], path: str) -> Iterator[Problem]:
        """Yield problems of the layers, and sections of the rotary embedding that do not fill a head."""
        yield from super().layer_problems(standard, path)
        dims = ModelDims.of(standard)
        assert dims is not None, "the values are well-formed"
        if self.num_features > dims.num_layers:
            found = f"deepstack_visual_indexes of {self.num_features} layers"
            expected = f"at most {dims.num_layers}, as num_hidden_layers says: each layer adds one's features"
            yield Problem(path=path, found=found, expected=expected, remedy=REMEDY)
        half, sections = dims.head_dim // 2, self.rotary_sections
        if len(sections) != NUM_AXES or sum(sections) != half:
            expected = f"{NUM_AXES} numbers of together {half}, half of a head"
            yield Problem(path=path, found=f"mrope_section = {list(sections)}", expected=expected, remedy=REMEDY)

    def adapter_problems(self) -> Iterator[Problem]:
        """Refuse adapters: none are for the tower."""
        found, expected = f"the section, with model_type {self.model_type}", "no such section: it reads images"
        remedy = 'Leave it out, and train less with trainer.megatron.freeze = "vision"'
        yield Problem(path="lora", found=found, expected=expected, remedy=remedy)


def qwen2_vl(config: Mapping[str, Any]) -> MegatronFamily:
    """Qwen2-VL."""
    return _family("qwen2_vl", config, has_qkv_biases=True, other_names=OTHER_NAMES)


def qwen2_5_vl(config: Mapping[str, Any]) -> MegatronFamily:
    """Qwen2.5-VL."""
    return _family("qwen2_5_vl", config, has_qkv_biases=True, other_names=OTHER_NAMES)


def qwen3_vl(config: Mapping[str, Any]) -> MegatronFamily:
    """Qwen3-VL, whose first layers are each followed by an addition of features from inside the tower (arXiv:2406.04334)."""
    layers, num_features = _flat(config).get("num_hidden_layers"), _count_features(_table(config, "vision_config"))
    return _family(
        "qwen3_vl",
        config,
        modules=NESTED,
        has_qk_norms=True,
        num_features=num_features,
        deepstack=tuple(layer < num_features for layer in range(layers)) if isinstance(layers, int) else (),
        has_interleaved_sections=True,
    )


def _family(model_type: str, config: Mapping[str, Any], **own: Any) -> MegatronFamily:
    defaults = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "tie_word_embeddings": False}
    return ImageFamily(
        model_type=model_type,
        class_name=IMAGE_MODELS[model_type],
        defaults=defaults,
        reads_images=True,
        rotary=("default", "mrope"),
        rotary_sections=_sections(_flat(config)),
        vision_parameters=_count_vision(_table(config, "vision_config")),
        **own,
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with the keys of `text_config` at its top; early files have them there alone."""
    shared = ("model_type", "architectures", "tie_word_embeddings")
    return {**config, **_table(config, "text_config"), **{key: config[key] for key in shared if key in config}}


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = config.get(key)
    return table if isinstance(table, Mapping) else {}


def _sections(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return how many of the rotary frequencies turn by each axis of a position."""
    for key in ("rope_parameters", "rope_scaling"):
        found = _table(config, key).get("mrope_section")
        if isinstance(found, list | tuple) and all(type(size) is int for size in found):
            return tuple(found)
    return ()


def _count_features(vision: Mapping[str, Any]) -> int:
    """Return the number of layers of Qwen3-VL's tower whose features go to the language model, by its class where config.json
    does not say."""
    import_transformers()
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    found = vision.get("deepstack_visual_indexes", Qwen3VLVisionConfig().deepstack_visual_indexes)
    return len(found) if isinstance(found, list | tuple) else 0


def _count_vision(vision: Mapping[str, Any]) -> int:
    """Return the number of the tower's parameters, without norms and biases; 0 where config.json leaves sizes out."""
    width, out = vision.get("embed_dim", vision.get("hidden_size")), vision.get("out_hidden_size", vision.get("hidden_size"))
    inner = vision.get("intermediate_size") or int((vision.get("mlp_ratio") or 0) * (width or 0))
    sizes = (width, out, inner, vision.get("depth"), vision.get("spatial_merge_size"))
    if not all(type(size) is int and size > 0 for size in sizes):
        return 0
    width, out, inner, depth, merge = map(int, sizes)  # type: ignore[arg-type]
    merged = merge**2 * width
    features = vision.get("deepstack_visual_indexes") or ()
    gated = 3 if "fullatt_block_indexes" in vision else 2
    return depth * (4 * width**2 + gated * width * inner) + (1 + len(features)) * merged * (merged + out)
