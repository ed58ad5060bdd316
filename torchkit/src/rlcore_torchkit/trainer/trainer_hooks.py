"""Parts of trainers' hooks: the model that a request names, saving, and the check of a checkpoint's shapes."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from attrs import evolve

from rlcore.schema.suggestions import listed
from rlcore.spi.context import TrainerContext
from rlcore.spi.errors import CheckpointError, ContractError
from rlcore.spi.lifecycle import SaveStateRequest, SaveStateResult
from rlcore.spi.trainer import ExportWeightsRequest, LogprobsRequest
from rlcore.spi.weights import WeightExport
from rlcore_torchkit.huggingface.hf_directory import save_hf

if TYPE_CHECKING:
    from torch import Tensor

MAX_LISTED = 5
ModelT = TypeVar("ModelT")


def requested_model(request: LogprobsRequest, policy: ModelT, reference: ModelT | None) -> ModelT:
    """The model whose log-probabilities are asked for; ContractError where it is a reference that was never built."""
    model = policy if request.model == "policy" else reference
    if model is None:
        raise ContractError("get_logprobs: found no reference policy; expected needs_reference in the trainer's context")
    return model


def save_state(
    request: SaveStateRequest,
    context: TrainerContext,
    weight_version: int,
    *,
    resume: Callable[[Path], tuple[str, ...]],
    export: Callable[[ExportWeightsRequest], WeightExport],
    adapters: Callable[[], Iterator[tuple[str, "Tensor"]]] | None = None,
    rank: int | None = None,
) -> SaveStateResult:
    """Write what the request asks for: `resume` writes this rank's part of a checkpoint into a directory and returns the names
    of its files; `export` streams the weights of a Hugging Face directory; `adapters` yields whole float32 adapters by name, on
    every rank, of which `rank` counts; None is the context's. StorageError where a write fails."""
    if request.kind == "resume":
        return SaveStateResult(files=resume(request.directory))
    if request.kind == "peft":
        lora = context.lora if context.lora is None or rank is None else evolve(context.lora, rank=rank)
        return SaveStateResult(files=_save_peft(request.directory, evolve(context, lora=lora), adapters))
    place = context.rank_info.rank
    files = save_hf(export, context.model, request.directory, rank=place, weight_version=weight_version, head=context.head)
    return SaveStateResult(files=files)


def _save_peft(
    directory: Path, context: TrainerContext, adapters: Callable[[], Iterator[tuple[str, "Tensor"]]] | None
) -> tuple[str, ...]:
    if context.lora is None or adapters is None:
        raise ContractError('save_state: found kind "peft" without adapters; expected `lora` in the trainer\'s context')
    is_writer = context.rank_info.rank == 0
    found = {name: tensor.cpu() for name, tensor in adapters() if is_writer}
    if not is_writer:
        return ()
    from rlcore_torchkit.adapters.peft_directory import write_adapters

    return write_adapters(directory, found, context.lora, context.model)


def check_same_shapes(where: Path, theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError unless the tensors of a checkpoint at `where` have the names and shapes of this model's."""
    different = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    if different:
        shapes = {name: [list(each[name]) if name in each else "absent" for each in (theirs, ours)] for name in different}
        lines = [f"{name}: {there} there, {here} here" for name, (there, here) in shapes.items()]
        found = listed(lines, MAX_LISTED, "; ")
        raise CheckpointError(f"{where}: the checkpoint of another model. Shapes differ: {found}")
