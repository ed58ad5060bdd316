"""Adapters in files: a PEFT directory, which PEFT and vLLM load, and a checkpoint's copy of those that a run began with."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.schema.file_limits import expanded
from rlcore.spi.context import ALL_LINEAR, LoraSpec, ModelSpec
from rlcore.spi.errors import CheckpointError, ModelError
from rlcore_torchkit.adapters.lora_targets import LORA_A
from rlcore_torchkit.adapters.peft_check import CONFIG_FILE, PREFIX, TENSOR_FILE, adapter_problems
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors
from rlcore_torchkit.huggingface.safetensors_files import not_finite, raise_model_problems


def write_adapters(directory: Path, adapters: Mapping[str, Tensor], spec: LoraSpec, model: ModelSpec) -> tuple[str, ...]:
    """Write float32 adapters by name; returns the names of the files. StorageError where the disk refuses them.

    Rows of A and columns of B behind `spec.rank` are left out: they are zero."""
    cut = {name: tensor[: spec.rank] if name.endswith(LORA_A) else tensor[:, : spec.rank] for name, tensor in adapters.items()}
    tensors = {f"{PREFIX}{name}": tensor.contiguous().cpu() for name, tensor in cut.items()}
    with model_storage_errors(directory):
        save_file(tensors, directory / TENSOR_FILE, metadata={"format": "pt"})
        content = json.dumps(adapter_config(spec, model, adapters), indent=2)
        (directory / CONFIG_FILE).write_text(content + "\n", encoding="utf-8")
    return CONFIG_FILE, TENSOR_FILE


def adapter_config(spec: LoraSpec, model: ModelSpec, names: Iterable[str]) -> dict[str, Any]:
    """The content of adapter_config.json for adapters of these names."""
    kinds = dict.fromkeys(name.split(".lora_")[0].rpartition(".")[2] for name in names)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path,
        "revision": model.revision,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": list(kinds if ALL_LINEAR in spec.targets else spec.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def read_adapters(
    directory: str, shapes: Mapping[str, tuple[int, ...]], spec: LoraSpec, model: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Adapters by name, on the host, in `dtype`; ModelError where they are not those of `spec` for this model, or not finite in
    it."""
    if problems := adapter_problems(spec, directory, model, shapes):
        raise ModelError(problems)
    file = expanded(directory) / TENSOR_FILE
    tensors = load_file(file)
    adapters = {name: tensors[f"{PREFIX}{name}"].to(dtype) for name in shapes}
    raise_model_problems(str(file), list(not_finite(adapters, str(file))))
    return adapters


FILE = "reference_adapters.safetensors"


def save_reference(directory: Path, adapters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Write whole adapters by name into a checkpoint; returns the name of the file. StorageError where the disk refuses it."""
    with model_storage_errors(directory):
        save_file({name: tensor.contiguous() for name, tensor in adapters.items()}, directory / FILE)
    return (FILE,)


def load_reference(directory: Path) -> dict[str, Tensor] | None:
    """Read what `save_reference` wrote, onto the host; None where the run began with the model alone. CheckpointError on
    failure."""
    if not (directory / FILE).exists():
        return None
    try:
        return load_file(directory / FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / FILE} cannot be read ({error}); resume from another checkpoint") from error
