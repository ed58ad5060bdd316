"""Steps of several adapters, by turns or together, and what comes of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from fsdp2_support import WEIGHTED, make_batch, split, step_request
from safetensors.torch import load_file

from rlcore.spi import (
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardBackwardTogetherRequest,
    LossInputs,
    LossOutput,
    LossSpec,
    OptimStepRequest,
    SaveStateRequest,
    UseAdapterRequest,
)
from rlcore_conformance.trainers.pieces import piece_of
from rlcore_fsdp2.adapters import trained


def likelihood_loss(inputs: LossInputs, config: None) -> LossOutput:
    """The mean negative log-probability."""
    logprobs = inputs.logprobs * inputs.loss_mask
    return LossOutput(loss=-logprobs.sum() / inputs.counts.num_loss_tokens, maxima={"least": -logprobs.detach().min()})


LIKELIHOOD = LossSpec(path="together_support:likelihood_loss", config=None, token_columns=())
TOLERANCE = 3e-6
"""Relative and absolute tolerance of float32 sums that are taken in another order."""


@frozen(kw_only=True)
class Round:
    """A piece of some adapters, and the updates behind it."""

    pieces: Mapping[str, ForwardBackwardRequest]
    updates: tuple[str, ...] = ()


@frozen(kw_only=True)
class Figures:
    """The results of rounds, and the gradients held behind each of them."""

    results: list[dict[str, ForwardBackwardResult]] = field(factory=list)
    gradients: list[dict[str, dict[str, torch.Tensor]]] = field(factory=list)
    norms: list[float] = field(factory=list)


def play(backend: Any, rounds: Sequence[Round], seeds: Mapping[str, int], *, together: bool) -> Figures:
    """Begin the adapters and make all rounds."""
    figures, pieces, versions = Figures(), dict.fromkeys(seeds, 0), dict.fromkeys(seeds, 0)
    for name, seed in seeds.items():
        backend.use_adapter(UseAdapterRequest(name=name, seed=seed))
    for one in rounds:
        asked = {name: evolve(piece, piece=pieces[name], weight_version=versions[name]) for name, piece in one.pieces.items()}
        answer = in_one_call if together else by_turns
        figures.results.append(answer(backend, asked))
        for name in asked:
            pieces[name] += 1
        figures.gradients.append({name: gradients(backend, name) for name in seeds})
        for name in one.updates:
            if pieces[name]:
                backend.use_adapter(UseAdapterRequest(name=name))
                update = backend.optim_step(OptimStepRequest(pieces=pieces[name], weight_version=versions[name]))
                figures.norms.append(update.grad_norm)
                versions[name], pieces[name] = update.weight_version, 0
    return figures


def in_one_call(backend: Any, pieces: Mapping[str, ForwardBackwardRequest]) -> dict[str, ForwardBackwardResult]:
    return dict(backend.forward_backward_together(ForwardBackwardTogetherRequest(pieces=pieces)).pieces)


def by_turns(backend: Any, pieces: Mapping[str, ForwardBackwardRequest]) -> dict[str, ForwardBackwardResult]:
    found = {}
    for name, piece in pieces.items():
        backend.use_adapter(UseAdapterRequest(name=name))
        found[name] = backend.forward_backward(piece)
    return found


def gradients(backend: Any, name: str) -> dict[str, torch.Tensor]:
    """Copies of the gradients that an adapter holds on this rank."""
    backend.use_adapter(UseAdapterRequest(name=name))
    held = {key: parameter.grad for key, parameter in trained(backend.policy).items() if parameter.grad is not None}
    return {key: getattr(gradient, "_local_tensor", gradient).clone() for key, gradient in held.items()}


def saved(backend: Any, name: str, directory: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of an adapter, as this rank writes them."""
    backend.use_adapter(UseAdapterRequest(name=name))
    directory.mkdir(parents=True)
    backend.save_state(SaveStateRequest(directory=directory, kind="resume"))
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def random_piece(seed: int, *, num_microbatches: int, loss: LossSpec = WEIGHTED, max_length: int = 11) -> Any:
    """A piece of so many microbatches of random sequences."""
    batch = make_batch(seed=seed, num_sequences=2 * num_microbatches, max_length=max_length)
    groups = [[2 * number, 2 * number + 1] for number in range(num_microbatches)]
    request = step_request(split(batch, groups), batch.counts(), loss=loss)
    return evolve(piece_of(request, request.microbatches, 0), logprobs=True)


def assert_close(found: Figures, expected: Figures, tolerance: float = TOLERANCE) -> None:
    """The same figures and gradients, up to rounding."""
    near = {"rtol": tolerance, "atol": tolerance}
    for mine, theirs in zip(found.results, expected.results, strict=True):
        assert [*mine] == [*theirs]
        for name, result in mine.items():
            other = theirs[name]
            assert result.weight_version == other.weight_version
            np.testing.assert_allclose(result.loss, other.loss, **near)
            assert result.metrics.keys() == other.metrics.keys()
            np.testing.assert_allclose([*result.metrics.values()], [*other.metrics.values()], **near)
            for own, its in zip(result.logprobs, other.logprobs, strict=True):
                np.testing.assert_allclose(own, its, rtol=0, atol=10 * tolerance)
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        for name, tensors in mine.items():
            assert_same_tensors(tensors, theirs[name], tolerance)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)


def assert_same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
