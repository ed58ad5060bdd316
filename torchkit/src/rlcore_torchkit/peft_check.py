"""Whether a PEFT directory holds adapters of the form and for the model that a recipe says; imports no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.model_files import read_object
from rlcore.schema.homes import expanded
from rlcore.schema.listing import listed
from rlcore.schema.reading import require_file
from rlcore.spi.errors import Problem
from rlcore.spi.lora import LoraSpec

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the name of each of a model's modules."""

_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
}
"""Keys of adapter_config.json and their values in the only form that is read: an absent key has its value."""
_MAX_NAMED = 3


def adapter_problems(spec: LoraSpec, directory: str, model: str, shapes: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """All that makes the PEFT directory another than one of `spec` for the model at `model`; `shapes` are those of the adapters
    by name."""
    folder = expanded(directory)
    config = read_object(folder / CONFIG_FILE)
    if isinstance(config, Problem):
        return [config]
    return [*_config_problems(config, spec, model, folder / CONFIG_FILE), *_tensor_problems(folder / TENSOR_FILE, shapes)]


def _config_problems(config: Mapping[str, Any], spec: LoraSpec, model: str, file: Path) -> Iterator[Problem]:
    for key, expected in _PLAIN.items():
        found = config.get(key, expected)
        if found != expected and (found or expected):
            yield Problem(path=str(file), found=f"{key} = {found!r}", expected=f"{expected!r}, a plain adapter")
    for key, ours, expected in (("r", "rank", spec.rank), ("lora_alpha", "alpha", spec.alpha)):
        if config.get(key) != expected:
            remedy = f"Set lora.{ours} to {config.get(key)}"
            yield Problem(
                path=str(file), found=f"{key} = {config.get(key)}", expected=f"lora.{ours} = {expected:g}", remedy=remedy
            )
    base = config.get("base_model_name_or_path")
    if base and not _is_same(str(base), model):
        remedy = "Name that model, or correct base_model_name_or_path where it is the same"
        yield Problem(path=str(file), found=f"an adapter of {base}", expected=f"one of {model}, the model.path", remedy=remedy)


def _is_same(one: str, other: str) -> bool:
    return one == other or expanded(one).resolve() == expanded(other).resolve()


def _tensor_problems(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    from safetensors import SafetensorError, safe_open

    try:
        require_file(file)
        with safe_open(file, "numpy") as tensors:
            found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        yield Problem(path=str(file), found=str(error), expected="a readable safetensors file")
        return
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
