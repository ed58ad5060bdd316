"""Hugging Face model directories, read and written by MLX."""

from pathlib import Path

import mlx.core as mx

from rlcore.files import storage_errors
from rlcore.model_files import AGAIN
from rlcore.schema.suggestions import listed
from rlcore.spi import ModelError, ModelSpec, Problem
from rlcore_mlx.decoder import Decoder, Weights
from rlcore_model_files.directory import SINGLE_FILE
from rlcore_torchkit.huggingface.hf_directory import write_companions
from rlcore_torchkit.huggingface.safetensors_files import unknown_tensors, weight_files


def load_weights(decoder: Decoder, spec: ModelSpec, dtype: str) -> dict[str, mx.array]:
    """All tensors of the model in this dtype; ModelError where one is missing, unknown, misshapen or cannot be read."""
    found: dict[str, mx.array] = {}
    for file in weight_files(spec):
        try:
            tensors: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
            mx.eval(tensors)
        except (OSError, RuntimeError) as error:
            raise ModelError([Problem(path=str(file), found=str(error), expected="a readable safetensors file")]) from error
        if wrong := [name for name, tensor in tensors.items() if not mx.isfinite(tensor).all()]:
            problem = f"NaN or infinite numbers in {listed(wrong, 5)}"
            raise ModelError([Problem(path=str(file), found=problem, expected="finite weights", remedy=AGAIN)])
        found |= tensors
    if decoder.dims.tied:  # some files hold a tied head a second time
        found.pop(f"{decoder.family.modules.head}.weight", None)
    shapes = decoder.shapes()
    known = {name for name in found if name in shapes or unknown_tensors([name], {}, spec.path)}
    if problems := shape_problems({name: tuple(found[name].shape) for name in known}, shapes):
        raise ModelError(
            [Problem(path=spec.path, found=problem, expected="the tensors of config.json") for problem in problems]
        )
    weights = {name: found[name].astype(getattr(mx, dtype)) for name in shapes}
    mx.eval(weights)
    return weights


def shape_problems(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> list[str]:
    """Report the tensors, found by name and shape, that are not as expected."""
    both = sorted(found.keys() & expected.keys())
    wrong = [f"{name} of {list(found[name])} for {list(expected[name])}" for name in both if found[name] != expected[name]]
    kinds = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown to the model": sorted(found.keys() - expected.keys()),
        "of another shape": wrong,
    }
    return [f"{len(names)} tensor(s) {kind}: {listed(names, 5)}" for kind, names in kinds.items() if names]


def save_weights(weights: Weights, source: ModelSpec, directory: Path) -> tuple[str, ...]:
    """Write a directory that transformers loads; config and tokenizer are those of the model that was trained."""
    with storage_errors("the model", directory):
        save_tensors(directory / SINGLE_FILE, weights, {"format": "pt"})
        companions = write_companions(source.path, source.revision, directory, source.dtype)
    return (SINGLE_FILE, *companions)


def save_tensors(file: Path, tensors: Weights, metadata: dict[str, str]) -> None:
    """A safetensors file; OSError where it cannot be written."""
    try:
        mx.save_safetensors(str(file), dict(tensors), metadata)
    except RuntimeError as error:
        raise OSError(str(error)) from error
