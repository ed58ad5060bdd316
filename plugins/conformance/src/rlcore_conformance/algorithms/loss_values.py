"""Values of a loss on a microbatch, and its derivatives with respect to a model's outputs for each token."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, TypeAlias

import numpy as np
from attrs import frozen

from rlcore.spi import GlobalCounts, LossInputs, LossSpec, TokenBatch
from rlcore.spi.arrays import Float32Array
from rlcore_conformance.references.reference import Float64Array

Figures: TypeAlias = Mapping[str, Float32Array]
"""A model's outputs, float32 [T] by the names of LossInputs' fields: logprobs, entropy, values, previous_logprobs."""


@frozen(kw_only=True, eq=False)
class LossValue:
    """A loss of one microbatch."""

    value: float
    gradients: Mapping[str, Float64Array]
    """float64 [T] by name: the derivatives with respect to figures; names on which the loss cannot depend are left out."""
    sums: Mapping[str, float]
    maxima: Mapping[str, float]


class HeldConstants:
    """The tensors that a loss detaches, kept from one call to the next, so that differences of its values are
    those of the function whose gradient it means."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.calls = 0


EvaluateLoss: TypeAlias = Callable[[LossSpec, TokenBatch, GlobalCounts, Figures, HeldConstants | None], LossValue]
"""The loss of a microbatch; with constants given, only its value counts, and those that an earlier call kept are used again."""


def torch_loss(
    spec: LossSpec, batch: TokenBatch, counts: GlobalCounts, figures: Figures, constants: HeldConstants | None = None
) -> LossValue:
    """The loss as trainers in torch compute it, with what it holds constant from `constants` where these are given."""
    import torch

    tensors = {name: torch.tensor(figure) for name, figure in figures.items()}
    leaves = {name: tensors[name].requires_grad_() for name in _leaves(spec, figures)}
    inputs = LossInputs(
        logprobs=tensors["logprobs"],
        entropy=tensors.get("entropy"),
        loss_mask=torch.tensor(batch.loss_mask),
        offsets=torch.tensor(batch.offsets),
        token_columns={name: torch.tensor(batch.token_columns[name]) for name in spec.token_columns},
        sequence_columns={name: torch.tensor(column) for name, column in batch.sequence_columns.items()},
        counts=counts,
        previous_logprobs=tensors.get("previous_logprobs"),
        values=tensors.get("values"),
    )
    before = None if constants is not None else _copies(inputs)
    with held(constants):
        output = _called(spec, inputs)
    if before is not None:
        changed = [name for name, tensor in _copies(inputs).items() if not torch.equal(tensor, before[name])]
        assert not changed, f"{spec.path} changed {', '.join(changed)} in place; expected it to change a copy"
    assert output.loss.shape == (), f"the loss is of shape {list(output.loss.shape)}; expected a scalar"
    assert output.loss.requires_grad, "the loss has no gradient"
    attached = [name for name, value in {**output.sums, **output.maxima}.items() if value.requires_grad]
    assert not attached, f"{spec.path}: the metrics {attached} have a gradient; expected them detached"
    found = torch.autograd.grad(output.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return LossValue(
        value=output.loss.item(),
        gradients={name: gradient.double().numpy() for name, gradient in zip(leaves, found, strict=True)},
        sums={name: value.item() for name, value in output.sums.items()},
        maxima={name: value.item() for name, value in output.maxima.items()},
    )


def _called(spec: LossSpec, inputs: LossInputs) -> Any:
    """Call the loss; AssertionError with its inputs where it raises."""
    try:
        return resolve_name(spec.path)(inputs, spec.config)
    except Exception as error:
        previous = "None, since AlgorithmNeeds.previous_logprobs is False" if inputs.previous_logprobs is None else "given"
        entropy = 'None, since LossSpec.entropy is "none"' if inputs.entropy is None else "given"
        raise AssertionError(
            f"{spec.path} raised {type(error).__name__}: {error}. It was given the token columns "
            f"{', '.join(spec.token_columns) or 'of no name'}; previous_logprobs: {previous}; entropy: {entropy}"
        ) from error


def _copies(inputs: LossInputs) -> dict[str, Any]:
    """Copies of the tensors that a loss gets, by their names."""
    named = {"loss_mask": inputs.loss_mask, "offsets": inputs.offsets, "logprobs": inputs.logprobs}
    named |= {f"token_columns[{name!r}]": tensor for name, tensor in inputs.token_columns.items()}
    named |= {f"sequence_columns[{name!r}]": tensor for name, tensor in inputs.sequence_columns.items()}
    named |= {name: getattr(inputs, name) for name in ("entropy", "previous_logprobs", "values")}
    return {name: tensor.detach().clone() for name, tensor in named.items() if tensor is not None}


def total(parts: list[LossValue], tokens: list[Any], num_tokens: int) -> LossValue:
    """The loss of all microbatches, whose `tokens` are numbers below `num_tokens`: gradients are by these numbers."""
    gradients = {name: np.zeros(num_tokens) for name in parts[0].gradients}
    for part, numbers in zip(parts, tokens, strict=True):
        for name, gradient in part.gradients.items():
            np.add.at(gradients[name], numbers, gradient)  # a sample may stand in the batch twice
    return LossValue(
        value=sum(part.value for part in parts),
        gradients=gradients,
        sums={name: sum(part.sums.get(name, 0.0) for part in parts) for part in parts for name in part.sums},
        maxima={
            name: max(part.maxima[name] for part in parts if name in part.maxima) for part in parts for name in part.maxima
        },
    )


def _leaves(spec: LossSpec, figures: Figures) -> list[str]:
    if "values" in figures:
        return ["values"]
    return ["logprobs", "entropy"] if spec.entropy == "loss" else ["logprobs"]


@contextmanager
def held(constants: HeldConstants | None) -> Iterator[None]:
    """With constants, `Tensor.detach` returns what its calls of the first time returned, one after another."""
    if constants is None:
        yield
        return
    import torch

    original, known = torch.Tensor.detach, len(constants.values)
    constants.calls = 0

    def detach(tensor: Any) -> Any:
        if not known:
            constants.values.append(original(tensor).clone())
            return constants.values[-1].clone()
        constants.calls += 1
        return constants.values[constants.calls - 1].clone()  # which the loss may change in place

    torch.Tensor.detach = detach  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.detach = original
