"""Norms of tensors' gradients by plain transformers and autograd in one process, and checks of one rank of any trainer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from fsdp2_support import Reference, exported, make_batch, split, step_request
from lora_support import SPEC, LoraReference, lora_context, write_adapter
from transformers.core_model_loading import revert_weight_conversion

from rlcore.spi import ForwardBackwardRequest, OptimStepRequest, TokenBatch, TrainStepResult

BATCH = make_batch()
RELATIVE = 1e-5
"""Most difference of a norm, relative to the norm of the whole gradient or to 1, and of that norm to the root of the sum of
squares."""


def norms_in_files(model: Any, gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The norm of each tensor of the model's files: transformers fuses experts when it loads them."""
    return norms_of(revert_weight_conversion(model, dict(gradients)))


def norms_of(gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The norm of each tensor, in float64."""
    return {name: float(gradient.double().norm()) for name, gradient in gradients.items()}


def adapter_norms(reference: LoraReference, batch: TokenBatch) -> dict[str, float]:
    """The norm of each factor's gradient; the gradients are dropped."""
    reference.backward(batch)
    factors = {"lora_A": "a", "lora_B": "b"}
    norms = {
        f"{name}.{key}.weight": float(getattr(layer, attribute).grad.norm())
        for name, layer in reference.layers.items()
        for key, attribute in factors.items()
    }
    reference.optimizer.zero_grad()
    return norms


def assert_norms(result: TrainStepResult, expected: Mapping[str, float], relative: float = RELATIVE) -> None:
    """The same names, each norm near, and together the norm of the whole gradient."""
    found, allowed = result.gradient_norms, relative * max(1.0, float(np.linalg.norm([*expected.values()])))
    assert found is not None
    assert found.keys() == expected.keys()
    wrong = {name: (found[name], norm) for name, norm in expected.items() if not abs(found[name] - norm) <= allowed}
    assert not wrong, f"found and expected norms of {wrong}; expected at most {allowed} between them"
    root = float(np.linalg.norm([*found.values()]))
    assert abs(root - result.grad_norm) <= RELATIVE * result.grad_norm, f"{root}, and grad_norm {result.grad_norm}"


def check_one_rank(backend: Any, directory: Path) -> None:
    """A clipped step on two microbatches."""
    reference = Reference(directory)
    reference.backward(BATCH)
    result = backend.train_step(evolve(step_request(split(BATCH, [[0, 3], [1, 2, 4, 5]]), BATCH.counts()), gradient_norms=True))
    assert result.grad_norm > reference.spec.max_grad_norm
    assert_norms(result, norms_in_files(reference.model, reference.gradients()))
    assert result.gradient_norms.keys() <= exported(backend, 1).keys()


def check_adapters(make: Any, model: Path, directory: Path) -> None:
    """Adapters alone, which begin with values of their own; `make` builds a backend from a context."""
    adapter = write_adapter(directory / "adapter", model)
    backend = make(lora_context(model, evolve(SPEC, init_from=str(adapter))))
    result = backend.train_step(evolve(step_request((BATCH,), BATCH.counts()), gradient_norms=True))
    assert_norms(result, adapter_norms(LoraReference(model, adapter), BATCH))


def norms_of_pieces(backend: Any, version: int, pieces: Sequence[Sequence[Sequence[int]]]) -> dict[str, float]:
    """The norms of a step in pieces of some microbatches, which leaves the weights as they are: its learning rate is 0."""
    request = step_request((), BATCH.counts(), version)
    for number, groups in enumerate(pieces):
        backend.forward_backward(
            ForwardBackwardRequest(
                microbatches=split(BATCH, groups),
                counts=request.counts,
                loss=request.loss,
                temperature=request.temperature,
                weight_version=version,
                piece=number,
                logprobs=False,
            )
        )
    step = OptimStepRequest(pieces=len(pieces), weight_version=version, learning_rate=0.0, gradient_norms=True)
    result = backend.optim_step(step)
    root = float(np.linalg.norm([*result.gradient_norms.values()]))
    assert abs(root - result.grad_norm) <= RELATIVE * result.grad_norm
    return dict(result.gradient_norms)


def check_pieces(backend: Any, version: int, order: Sequence[int], cuts: Sequence[str]) -> None:
    """The norms of the sequences in an order, each followed by no cut, the end of a microbatch or that of a piece, are those of
    all sequences in one microbatch."""
    pieces: list[list[list[int]]] = [[[]]]
    for sequence, cut in zip(order, ["none", *cuts], strict=True):
        if cut == "piece":
            pieces.append([[]])
        elif cut == "microbatch":
            pieces[-1].append([])
        pieces[-1][-1].append(sequence)
    expected = norms_of_pieces(backend, version, [[[*range(BATCH.num_sequences)]]])
    found = norms_of_pieces(backend, version + 1, pieces)
    assert found.keys() == expected.keys()
    whole = np.linalg.norm([*expected.values()])
    assert max(abs(found[name] - norm) for name, norm in expected.items()) <= RELATIVE * whole
