"""Check that a PEFT directory holds plain LoRA adapters for the recipe's model, without importing torch."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.model_files import read_object
from rlcore.schema.file_limits import expanded, require_file
from rlcore.schema.suggestions import listed
from rlcore.schema.types import is_number
from rlcore.spi.context import LoraSpec
from rlcore.spi.errors import Problem

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix that PEFT gives to the name of each module."""

_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "use_rslora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "megatron_config": None,
    "trainable_token_indices": None,
    "loftq_config": {},
    "corda_config": None,
    "lora_ga_config": None,
    "use_dora": False,
    "velora_config": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "monteclora_config": None,
    "layer_replication": None,
    "lora_bias": False,
    "target_parameters": None,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "ensure_weight_tying": False,
}
"""Keys of adapter_config.json with the values of plain LoRA, the only ones accepted. An absent key or null means this value."""
_UNCHANGED_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Accepted values of `init_lora_weights`. All others change the base model, or freeze a part of the adapters."""
_CHECKED = ("r", "lora_alpha", "target_modules", "base_model_name_or_path", "revision")
"""Keys that are compared with the recipe; `target_modules` by the adapters' tensors."""
_NO_EFFECT = (
    *("auto_mapping", "peft_version", "inference_mode", "runtime_config"),
    "lora_dropout",  # the recipe's lora.dropout counts
    "eva_config",  # how the first values were found
    *("megatron_core", "qalora_group_size"),  # read with megatron_config and use_qalora alone
)
"""Keys that have no effect on trained adapters."""
_PEFT_DEFAULT = 8
"""PEFT's own rank and alpha, which count where adapter_config.json has none."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_NAMED = 3


def adapter_problems(
    spec: LoraSpec, directory: str, model: str, shapes: Mapping[str, tuple[int, ...]], *, revision: str | None = None
) -> list[Problem]:
    """Return each difference between the PEFT directory and adapters of `spec` for the model at `model`.

    `shapes` are those of the adapters, by name. `revision` is the model's on the Hub, and is compared where it is given.
    """
    folder = expanded(directory)
    config = read_object(folder / CONFIG_FILE)
    if isinstance(config, Problem):
        return [config]
    file = folder / CONFIG_FILE
    return [
        *_form_problems(config, file),
        *_recipe_problems(config, spec, model, revision, file),
        *_target_problems(config.get("target_modules"), shapes, file),
        *_tensor_problems(folder / TENSOR_FILE, shapes),
    ]


def _form_problems(config: Mapping[str, Any], file: Path) -> Iterator[Problem]:
    """Yield a problem for each key that makes the adapters anything but plain LoRA, and for each unknown key that is set."""
    for key, found in config.items():
        if key in _CHECKED or key in _NO_EFFECT or _is_plain(key, found):
            continue
        expected, remedy = f"{_PLAIN.get(key)!r}, a plain adapter", "Convert the adapters to plain LoRA, or merge them"
        if key == "init_lora_weights":
            expected = f"one of {', '.join(map(repr, _UNCHANGED_BASE))}, which leave the base model as it is"
            remedy = "Save them with PEFT's path_initial_model_for_weight_conversion, which makes plain adapters of them"
        elif key not in _PLAIN:
            expected, remedy = "no such key, whose meaning is unknown", "Take it out where it changes nothing"
        yield Problem(path=str(file), found=f"{key} = {found!r}", expected=expected, remedy=remedy)


def _is_plain(key: str, found: Any) -> bool:
    """Return whether a key has the value of a plain adapter; for an unknown key that is null, false or an empty value. The
    number 0 is a value."""
    if found is None:
        return key != "peft_type"
    if key == "init_lora_weights":
        return (found.lower() if isinstance(found, str) else found) in _UNCHANGED_BASE
    expected = _PLAIN.get(key)
    return found == expected or (not found and not expected and type(found) not in (int, float))


def _recipe_problems(
    config: Mapping[str, Any], spec: LoraSpec, model: str, revision: str | None, file: Path
) -> Iterator[Problem]:
    """Yield a problem for each key that contradicts the recipe."""
    for key, option, expected in (("r", "rank", spec.rank), ("lora_alpha", "alpha", spec.alpha)):
        found = config.get(key, _PEFT_DEFAULT)
        if found != expected:
            remedy = f"Set lora.{option} to {found}" if is_number(found) else "PEFT itself reads a number there"
            yield Problem(path=str(file), found=f"{key} = {found}", expected=f"lora.{option} = {expected:g}", remedy=remedy)
    base, trained_on = config.get("base_model_name_or_path"), config.get("revision") or revision
    if base and not _is_same(str(base), model):
        remedy = "Name that model, or correct base_model_name_or_path where it is the same"
        yield Problem(path=str(file), found=f"an adapter of {base}", expected=f"one of {model}, the model.path", remedy=remedy)
    elif revision is not None and trained_on != revision:
        remedy = f"Set model.revision to it, or correct it in {CONFIG_FILE} where the weights are the same"
        ours = f"{revision}, the model.revision"
        yield Problem(path=str(file), found=f"revision = {trained_on}", expected=ours, remedy=remedy)


def _is_same(one: str, other: str) -> bool:
    return one == other or ("\0" not in one and expanded(one).resolve() == expanded(other).resolve())


def _target_problems(targets: object, shapes: Mapping[str, tuple[int, ...]], file: Path) -> Iterator[Problem]:
    """Refuse adapters of layers that target_modules leaves out, as a list of names or a pattern: PEFT computes without them."""
    if not targets or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    listed_targets = [str(target) for target in targets] if isinstance(targets, list) else []
    modules = dict.fromkeys(name.partition(".lora_")[0] for name in shapes)
    try:
        others = [
            module
            for module in modules
            if not any(f".{module}".endswith(f".{target}") for target in listed_targets)
            and not (isinstance(targets, str) and re.fullmatch(targets, module))
        ]
    except re.error as error:
        yield Problem(path=str(file), found=f"target_modules = {targets!r} ({error})", expected="a list of names, or a pattern")
        return
    if others:
        found = f"target_modules = {targets!r:.99} without {listed(others, _MAX_NAMED)}"
        yield Problem(path=str(file), found=found, expected="every layer of lora.targets")


def _tensor_problems(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    from safetensors import SafetensorError, safe_open

    try:
        require_file(file)
        with safe_open(file, "numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            found = {name: tuple(each.get_shape()) for name, each in slices.items()}
            odd = [f"{name} in {each.get_dtype()}" for name, each in slices.items() if each.get_dtype() not in _FLOATS]
    except (OSError, SafetensorError) as error:
        yield Problem(path=str(file), found=str(error), expected="a readable safetensors file")
        return
    if odd:
        expected_dtypes = "adapters in float64, float32, bfloat16 or float16"
        yield Problem(path=str(file), found=listed(odd, _MAX_NAMED), expected=expected_dtypes)
    expected = {f"{PREFIX}{name}": shape for name, shape in shapes.items()}
    if missing := [name for name in expected if name not in found]:
        named = listed(missing, _MAX_NAMED)
        yield Problem(path=str(file), found=f"no {named}", expected="an adapter for every layer of lora.targets")
    if surplus := [name for name in found if name not in expected]:
        named, remedy = listed(surplus, _MAX_NAMED), "Set lora.targets to those that it was trained with"
        yield Problem(path=str(file), found=named, expected="adapters for the layers of lora.targets alone", remedy=remedy)
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            yield Problem(
                path=str(file), found=f"{name} of shape {list(found[name])}", expected=f"{list(shape)}, as the model has"
            )
            return
