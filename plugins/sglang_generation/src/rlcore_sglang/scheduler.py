"""Runs in SGLang's scheduler processes: their start, and the loading of weights."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_torchkit.refit.held_digests import held_digests

LOADER = f"{__name__}.load"
"""The name under which SGLang finds `load`."""


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's own scheduler, in which the model's end tokens stop nothing: a request names what does."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler import run_scheduler_process

    assert callable(ModelConfig._get_hf_eos_token_id)
    ModelConfig._get_hf_eos_token_id = lambda _model_config: set()
    run_scheduler_process(*args, **kwargs)


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """A weight loader of SGLang's. The one tensor is an order in JSON; the answer goes to the file that it names.

    It never raises, which would end the engine.
    """
    ((_, content),) = named_tensors
    order = json.loads(bytes(content.cpu().tolist()))
    try:
        with torch.no_grad():
            answer = _STEPS[order["step"]](model, order)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    _write(Path(order["answer"]), answer)


def order_tensor(order: Mapping[str, Any]) -> Tensor:
    """uint8 [bytes]: an order as `load` takes it."""
    return torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)


def answer_file(answer: Path, rank: int) -> Path:
    """Return the file that a rank of the engine writes."""
    return answer.with_name(f"{answer.name}.{rank}")


def _begin(model: torch.nn.Module, order: Mapping[str, Any]) -> dict[str, Any]:
    """Fill every parameter with NaN, so that what no tensor fills shows."""
    del order
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    return {}


def _load_bucket(model: torch.nn.Module, order: Mapping[str, Any]) -> dict[str, Any]:
    """Load a file of tensors; the digests of what arrived."""
    from safetensors.torch import load_file

    tensors = load_file(order["file"])
    device = next(model.parameters()).device
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    digests = tensor_digests(placed.values())
    model.load_weights(list(placed.items()))  # type: ignore[operator]
    return {"digests": dict(zip(placed, digests, strict=True))}


def _end(model: torch.nn.Module, order: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that nothing filled, and the bytes of all."""
    del order
    parameters = dict(model.named_parameters())
    unfilled = [name for name, parameter in parameters.items() if parameter.isnan().any()]
    return {"unfilled": unfilled, "num_bytes": sum(parameter.nbytes for parameter in parameters.values())}


def _held(model: torch.nn.Module, order: Mapping[str, Any]) -> dict[str, Any]:
    """The digests of what this process computes with."""
    del order
    return {"digests": held_digests(model)}


_STEPS = {"begin": _begin, "bucket": _load_bucket, "end": _end, "held": _held}


def _write(answer: Path, content: Mapping[str, Any]) -> None:
    """Write the answer of this rank, so that no reader sees half of it."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    file = answer_file(answer, rank)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(content))
    os.replace(partial, file)
