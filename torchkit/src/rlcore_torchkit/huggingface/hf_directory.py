"""A Hugging Face model directory, streamed from a weight export."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.files import storage_errors
from rlcore.model_files import CONFIG_FILE
from rlcore.schema.file_limits import expanded
from rlcore.spi.context import ModelSpec
from rlcore.spi.errors import ContractError, ModelError, StorageError
from rlcore.spi.trainer import ExportWeightsRequest
from rlcore.spi.weights import ITEM_BYTES, DtypeName, Head, WeightExport
from rlcore_model_files.directory import INDEX_FILE, SINGLE_FILE
from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.registry import find_architecture
from rlcore_torchkit.huggingface.companion_files import companion_names, known_names, own_code
from rlcore_torchkit.huggingface.safetensors_files import model_file

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 2**28


def save_hf(
    export: Callable[[ExportWeightsRequest], WeightExport],
    model: ModelSpec,
    directory: Path,
    *,
    rank: int,
    weight_version: int,
    head: Head = "tokens",
) -> tuple[str, ...]:
    """Write a trainer's weights, which `export` streams, in the model's dtype as a directory that transformers and vLLM load.

    Every rank calls it and takes part in the export; rank 0 writes. Returns the names of the files that this rank has written.
    StorageError where a write fails.
    """
    request = ExportWeightsRequest(weight_version=weight_version, dtype=model.dtype, max_bucket_bytes=BUCKET_BYTES)
    weights = export(request)
    try:
        if rank == 0:
            return write_hf_directory(weights, model.path, directory, model.dtype, revision=model.revision, head=head)
    except Exception:
        with suppress(Exception):  # what comes of that is no cause of the first
            _take_part(weights)  # to its end: the other ranks wait in it for this one
        raise
    _take_part(weights)
    return ()


def _take_part(weights: WeightExport) -> None:
    for _ in weights.buckets:
        pass


def write_hf_directory(
    export: WeightExport,
    source: str,
    directory: Path,
    dtype: DtypeName,
    *,
    revision: str | None = None,
    max_shard_bytes: int = 2 * 2**30,
    head: Head = "tokens",
) -> tuple[str, ...]:
    """Write `export` as a directory that transformers and vLLM load; returns the names of the files written.

    `source` is the model that was trained, a directory or a name on the Hub: config, generation config and tokenizer come
    from it. Tensors are written in `dtype`, or in the dtype that the model keeps them in. At most one shard is in memory at a
    time. With the head "value" the config is that of a sequence classifier with one label. StorageError where a write fails.
    """
    with model_storage_errors(directory):
        sizes = [(spec.name, prod(spec.shape) * ITEM_BYTES[spec.dtype if spec.keeps_dtype else dtype]) for spec in export.specs]
        shards = _plan(sizes, max_shard_bytes)
        files = _write_shards(_tensors(export, dtype), shards, directory)
        if len(shards) > 1:
            files.append(_write_index(sizes, shards, directory))
        return (*files, *write_companions(source, revision, directory, dtype, head))


@contextmanager
def model_storage_errors(directory: Path) -> Iterator[None]:
    """`rlcore.files.storage_errors` for a model's files, those that safetensors writes among them."""
    from safetensors import SafetensorError

    with storage_errors("the model", directory):
        try:
            yield
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _plan(sizes: Sequence[tuple[str, int]], max_shard_bytes: int) -> dict[str, list[str]]:
    """Return the tensors of each file, in the export's order. `sizes` are their names and bytes."""
    groups: list[list[str]] = [[]]
    num_bytes = 0
    for name, size in sizes:
        if groups[-1] and num_bytes + size > max_shard_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(name)
        num_bytes += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": names for number, names in enumerate(groups, 1)}


def _tensors(export: WeightExport, dtype: DtypeName) -> Iterator[tuple[str, "Tensor"]]:
    """The export's tensors on the host, none of them sharing memory with what the next bucket overwrites."""
    import torch

    kept = {spec.name: getattr(torch, spec.dtype) for spec in export.specs if spec.keeps_dtype}
    for bucket in export.buckets:
        for named in bucket.tensors:
            tensor = named.tensor.detach()
            yield (
                named.name,
                tensor.to(
                    device="cpu", dtype=kept.get(named.name, getattr(torch, dtype)), copy=not export.persistent
                ).contiguous(),
            )


def _write_shards(tensors: Iterator[tuple[str, "Tensor"]], shards: dict[str, list[str]], directory: Path) -> list[str]:
    from safetensors.torch import save_file

    for file, names in shards.items():
        shard: dict[str, Tensor] = {}
        for expected in names:
            name, tensor = next(tensors, ("nothing", None))
            if name != expected or tensor is None:
                raise ContractError(f"weight export: found {name}; expected {expected}, the next of its specs")
            shard[name] = tensor
        save_file(shard, directory / file, metadata={"format": "pt"})
    surplus = next(tensors, None)
    if surplus is not None:
        raise ContractError(f"weight export: found {surplus[0]} after the last of its specs; expected no more")
    return list(shards)


def _write_index(sizes: Sequence[tuple[str, int]], shards: dict[str, list[str]], directory: Path) -> str:
    places = {name: file for file, names in shards.items() for name in names}
    _write_json(directory / INDEX_FILE, {"metadata": {"total_size": sum(size for _, size in sizes)}, "weight_map": places})
    return INDEX_FILE


def write_companions(source: str, revision: str | None, directory: Path, dtype: DtypeName, head: Head = "tokens") -> list[str]:
    """config.json with the dtype and the class written, and copies of the companion files and of the model's own code."""
    spec = ModelSpec(path=source, revision=revision)
    try:
        config_file = model_file(spec, CONFIG_FILE)
        found = {} if config_file is None else _companions(spec, config_file)
    except ModelError as error:  # the Hub does not answer any more
        raise StorageError(f"writing the model to {directory} failed: {'; '.join(map(str, error.problems))}") from error
    if config_file is None:
        raise StorageError(f"writing the model to {directory} failed: {source} no longer has a config.json")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    if head == "value":
        config |= _classifier(config, source)
    is_here = expanded(source).is_dir()
    _write_json(directory / CONFIG_FILE, config | {"dtype": dtype})
    for name, file in found.items():
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, directory / name)
    for name in (CONFIG_FILE, *found):
        if (auto_map := own_code(directory / name)) and not is_here:  # transformers fetches the code from there
            content = json.loads((directory / name).read_text(encoding="utf-8"))
            places = {kind: _on_hub(place, source) for kind, place in auto_map.items()}
            _write_json(directory / name, content | {"auto_map": places})
    return [CONFIG_FILE, *found]


def copy_companions(spec: ModelSpec, directory: Path) -> None:
    """Copy a model's tokenizer, chat templates and generation config, without processors of images or sound."""
    config_file = model_file(spec, CONFIG_FILE)
    for name, file in ({} if config_file is None else _companions(spec, config_file)).items():
        if not name.startswith(("processor_config", "preprocessor_config", "video_preprocessor_config")):
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, directory / name)


def _companions(spec: ModelSpec, config_file: Path) -> dict[str, Path]:
    """Return the companion files by name, with the modules of a directory's own code.

    For a model on the Hub these are the files in the cache folder of its config.json, and further files of known names.
    """
    folder = config_file.parent
    found = {name: folder / name for name in companion_names(folder)}
    if expanded(spec.path).is_dir():
        if any(own_code(file) for file in (config_file, *found.values())):
            found |= {file.name: file for file in sorted(folder.glob("*.py"))}
        return found
    for name in sorted(known_names() - found.keys()):
        if (file := model_file(spec, name)) is not None:
            found[name] = file
    return found


def _on_hub(place: Any, source: str) -> Any:
    """A class, or for tokenizers two or None, in transformers' form REPOSITORY--MODULE.CLASS."""
    if isinstance(place, list):
        return [_on_hub(each, source) for each in place]
    return place if place is None or "--" in place else f"{source}--{place}"


def _classifier(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The keys of config.json of a classifier with one label."""
    family = find_architecture(config, source)
    assert isinstance(family, Architecture), "the model was loaded"
    return {"architectures": [family.classifier_name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
