"""Decoders that no family describes: which of transformers' causal language models train through their own classes.

Importing this file imports neither torch nor transformers.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.spi.errors import ModelError, Problem
from rlcore_model_files.weight_headers import TEXT_KEYS
from rlcore_torchkit.architectures.architecture import ARCHITECTURES, OLD_KINDS, Architecture
from rlcore_torchkit.architectures.image_faults import image_fault
from rlcore_torchkit.architectures.registered_classes import registered_class
from rlcore_torchkit.architectures.registry import RENAMED, find_architecture, renamed_problem
from rlcore_torchkit.requirements import first_transformers, newer_transformers
from rlcore_torchkit.transformers_import import import_transformers

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
STATE_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Layers that hand a state from token to token, which nothing resets where another sequence of a row begins."""
LAYER_KINDS = _ATTENTION_KINDS | STATE_KINDS | {"moe", "mlp", "sparse", "dense"}
"""Entries of config.json's `layer_types` that packed attention computes: transformers' words, and older ones that it reads."""
IMAGE_MODELS = {
    "cosmos3_omni": "Cosmos3OmniForConditionalGeneration",
    "glm46v": "Glm46VForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm_ocr": "GlmOcrForConditionalGeneration",
    "glmga": "Glm46VForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
"""Models of text and images by their model_type: their language model gets images as embeddings in place of tokens."""
_UNTRAINED = {"reformer": "layers whose backward pass runs in training mode alone, where they draw random hashes"}
"""Classes whose backward pass fails, by model_type: what a trial of the forward pass does not see."""
EXPERT_STYLES = {"moe_tp_experts"}
LAYOUT_STYLES = EXPERT_STYLES | {
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
}
"""Accepted styles of a layer's modules in plans of transformers."""
_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def described_family(config: Mapping[str, Any], path: str = "") -> Architecture | None:
    """Return the family of the model with this config.json, whatever it ends in; None where it trains through its own class."""
    family = find_architecture(config, path)
    return None if isinstance(family, Problem) or any(family.problems(config, path, "value")) else family


def decoder_problems(config: Mapping[str, Any], path: str, *, trust_remote_code: bool) -> Iterator[Problem]:
    """Refuse a model that cannot train through its own class, by the content of its config.json, which lies at `path`."""
    family = find_architecture(config, path)
    if isinstance(family, Architecture) and (malformed := family.malformed_values(config, path)):
        yield from malformed
        return
    yield from _class_problems(config, path, trust_remote_code)
    if reason := _UNTRAINED.get(str(config.get("model_type"))):
        yield Problem(path=path, found=reason, expected="layers with gradients in eval mode", remedy="Use another model")
    if config.get("model_type") == "big_bird" and config.get("attention_type", "block_sparse") == "block_sparse":
        found, remedy = 'attention_type "block_sparse", which sees later tokens', f"Set attention_type in {path}"
        yield Problem(path=path, found=found, expected='"original_full"', remedy=remedy)
    if is_image_model(config):
        return
    for key in TEXT_KEYS:
        if config.get(key):
            fault = image_fault(str(config.get("model_type")))
            found = f"a {key}, as models of images or sound have{fault and ': ' + fault}"
            expected = f"text alone, or one of {', '.join(IMAGE_MODELS)}"
            remedy = "Take its language model alone: python -m rlcore_torchkit.huggingface.language_model MODEL DIRECTORY"
            yield Problem(path=path, found=found, expected=expected, remedy=remedy)


def has_unpacked_layers(config: Mapping[str, Any]) -> bool:
    """Return whether the model with this config.json has layers of a kind that packed attention does not compute."""
    return bool(config.get("attention_chunk_size")) or not _layer_kinds(config) <= LAYER_KINDS


def is_image_model(config: Mapping[str, Any]) -> bool:
    """Return whether the model with this config.json is one of IMAGE_MODELS."""
    return str(config.get("model_type")) in IMAGE_MODELS and bool(config.get("vision_config"))


def is_vision(name: str) -> bool:
    """Return whether a parameter of one of IMAGE_MODELS belongs to the vision tower or its projection, by its name."""
    return ".visual." in f".{name}"


def length_problems(config: Mapping[str, Any], path: str, max_sequence_length: int) -> Iterator[Problem]:
    """Angles of positions that would change with the longest sequence of a microbatch."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = (rope, *rope.values()) if isinstance(rope, Mapping) else ()
    tables = [table for table in parts if isinstance(table, Mapping)]
    original = config.get("original_max_position_embeddings")
    for table in tables:
        limit = table.get("original_max_position_embeddings") or original or config.get("max_position_embeddings")
        if table.get("rope_type", table.get("type")) == "longrope" and isinstance(limit, int) and limit < max_sequence_length:
            found = f"rope_type = longrope, whose angles change beyond {limit} tokens, for sequences of {max_sequence_length}"
            remedy = "Lower rollout.max_prompt_tokens or rollout.max_response_tokens"
            yield Problem(path=path, found=found, expected=f"sequences of at most {limit}", remedy=remedy)


def _class_problems(config: Mapping[str, Any], path: str, trust_remote_code: bool) -> Iterator[Problem]:
    """A class that transformers does not know, or that is no causal language model."""
    import_transformers()
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type, expected = str(config.get("model_type")), f"a causal language model that transformers {__version__} knows"
    classes = config.get("architectures") or ["none"]
    found = classes[0] if isinstance(classes, list) else classes
    known = IMAGE_MODELS.get(model_type) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    known = known or registered_class(model_type)
    if known is None and model_type in RENAMED and not trust_remote_code:
        yield renamed_problem(model_type, path)
    elif known is None and config.get("auto_map"):
        if not trust_remote_code:
            given = f"model_type {model_type}, whose code comes with the model"
            remedy = "Read it, and then set model.trust_remote_code to true"
            if first := first_transformers(config):
                remedy = f"{first}; or read the code, and then set model.trust_remote_code to true"
            yield Problem(path=path, found=given, expected=f"{expected}, or code that the recipe trusts", remedy=remedy)
        elif missing := sorted(set(_missing_code(config["auto_map"], Path(path)))):
            named = f"no {', '.join(missing)}, which auto_map names"
            yield Problem(
                path=path, found=named, expected="the model's code beside it", remedy="Copy it from where the model is"
            )
    elif known is None:
        remedy = newer_transformers(config) or "Correct it, or give the class as a file: docs/models.md, A model that is new"
        yield Problem(path=path, found=f"model_type {model_type}", expected=expected, remedy=remedy)
    elif found != known:
        expected = f"{known}, the language model of model_type {model_type}"
        remedy = newer_transformers(config) or ARCHITECTURES
        yield Problem(path=path, found=f"architecture {found}", expected=expected, remedy=remedy)


def _missing_code(auto_map: Any, file: Path) -> Iterator[str]:
    """Yield the modules of a local model's own code that are not beside its config.json, `file`."""
    named = auto_map.items() if isinstance(auto_map, Mapping) and file.is_file() else ()
    for kind, place in named:
        module = f"{str(place).partition('.')[0]}.py"
        if kind in ("AutoConfig", "AutoModelForCausalLM") and "--" not in module and not (file.parent / module).is_file():
            yield module


def layers_of(model: Any) -> Any:
    """Return the decoder layers of a transformers model in order: the outermost ModuleList of the length that config.json
    names. ModelError where there is none."""
    family = described_family(model.config.to_dict())
    if family is not None:
        return family.modules.layers_of(model)
    from torch.nn import ModuleList

    count = model.config.get_text_config().num_hidden_layers
    named = ((name, module) for name, module in model.named_modules() if not is_vision(name))
    found = {name: module for name, module in named if isinstance(module, ModuleList) and len(module) == count}
    if not found:
        expected = f"a list of {count} layers, as num_hidden_layers says"
        raise ModelError([Problem(path=model.config.name_or_path, found=f"none in {type(model).__name__}", expected=expected)])
    return found[min(found, key=lambda name: (name.count("."), name))]


def has_states(model: Any) -> bool:
    """Return whether layers of a transformers model pass a state between tokens, such as convolutions and linear attention."""
    return bool(state_kinds(model.config.to_dict())) or bool(getattr(model, "_is_stateful", False))


def state_kinds(config: Mapping[str, Any]) -> set[str]:
    """The kinds of such layers in the content of a config.json, of a model of images in that of its language model."""
    return _layer_kinds(config.get("text_config") or config if is_image_model(config) else config) & STATE_KINDS


def _layer_kinds(config: Mapping[str, Any]) -> set[str]:
    listed = config.get("layer_types") or config.get("layers_block_type") or ()
    return {OLD_KINDS.get(kind, kind) for kind in map(str, listed if isinstance(listed, list) else ())}


def head_scale(config: Any) -> float:
    """Return the factor of logits behind the head, by the keys that transformers' classes read."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) * float(getattr(config, "lm_head_multiplier", None) or 1.0)
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    return scale * scaling if getattr(config, "model_type", None) == "hyperclovax" else scale / scaling


def logit_cap(config: Any) -> float | None:
    """Return the cap of logits, cap · tanh(logits / cap), by the keys that transformers' classes read; None without one."""
    return next((float(cap) for key in _LOGIT_CAPS if (cap := getattr(config, key, None))), None)


def layer_windows(config: Any) -> int | None:
    """Return the number of layers that see a window alone; None where config.json lists no kinds of layers."""
    kinds = getattr(config.get_text_config(), "layer_types", None)
    return None if kinds is None else sum(kind in ("sliding_attention", "hybrid_sliding") for kind in kinds)


def layout_plan(config: Any) -> Mapping[str, str] | None:
    """Return how tensor ranks divide a model's layers, by its decoder's names, as its transformers config, or class of configs,
    says; None where it says nothing, or names a style that is not known here."""
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    experts = tuple(f"{name}." for name, style in plan.items() if style in EXPERT_STYLES)
    known = {name: style for name, style in plan.items() if name.startswith("layers.") and not name.startswith(experts)}
    return known if known and set(known.values()) <= LAYOUT_STYLES else None


def has_layout_plan(config: Mapping[str, Any]) -> bool:
    """Return whether `layout_plan` has one for the model with this config.json; True where its class comes with it."""
    import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    model_type = str(config.get("model_type"))
    return model_type not in CONFIG_MAPPING_NAMES or layout_plan(CONFIG_MAPPING[model_type]) is not None


def is_described(model: Any) -> bool:
    """Return whether a family describes a transformers model, which then trains by the family's own fast path."""
    return described_family(model.config.to_dict()) is not None
