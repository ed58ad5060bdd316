"""Checks of what trainers return, and of the settings of a step; ContractError or NonFiniteError names the value."""

from rlcore import spi
from rlcore.registry.checks import (
    TOLERANCE,
    check_int,
    check_metrics,
    check_number,
    check_own_names,
    check_specs,
    check_token_arrays,
)


def check_step(request: spi.TrainStepRequest, result: spi.TrainStepResult, dtype: str) -> None:
    """Raise unless a step's figures are those of its request."""
    _check_update(request, result)
    _check_gradients(request, result, dtype)
    for name, bound in request.bounds.items():
        if name in result.metrics and result.metrics[name] > bound:
            found = f"{result.metrics[name]}, above its bound {bound}"
            raise spi.ContractError(f"metrics[{name!r}]: found {found}; expected the step refused with BoundError")


def check_piece(request: spi.ForwardBackwardRequest, result: spi.ForwardBackwardResult, dtype: str) -> None:
    """Raise unless the figures of a piece are those of its request."""
    check_version(result.weight_version, request.weight_version)
    _check_gradients(request, result, dtype)


def check_pieces(request: spi.ForwardBackwardTogetherRequest, result: spi.ForwardBackwardTogetherResult, dtype: str) -> None:
    """Raise unless there are figures of each adapter's piece."""
    if [*result.pieces] != [*request.pieces]:
        raise spi.ContractError(f"pieces: found those of {[*result.pieces]}; expected {[*request.pieces]}")
    for name, piece in request.pieces.items():
        check_piece(piece, result.pieces[name], dtype)


def check_optim_step(request: spi.OptimStepRequest, result: spi.OptimStepResult) -> None:
    """Raise unless an update's figures are those of its request."""
    _check_update(request, result)
    check_metrics("metrics", result.metrics)
    check_own_names("metrics", result.metrics.keys())


def check_settings(request: spi.OptimStepRequest) -> None:
    """ContractError where a setting is none that AdamW takes."""
    at_least_0 = {"learning_rate": request.learning_rate, "eps": request.eps, "max_grad_norm": request.max_grad_norm}
    for name, value in {**at_least_0, "weight_decay": request.weight_decay}.items():
        if value is not None and not check_number(name, value) >= 0:
            raise spi.ContractError(f"optim_step: {name}: found {value}; expected at least 0")
    betas = (0.0, 0.0) if request.betas is None else request.betas
    if len(betas) != 2 or not all(0 <= check_number("betas", beta) < 1 for beta in betas):
        raise spi.ContractError(f"optim_step: betas: found {betas}; expected two numbers from 0 to below 1")


def _check_update(
    request: spi.TrainStepRequest | spi.OptimStepRequest, result: spi.TrainStepResult | spi.OptimStepResult
) -> None:
    check_version(result.weight_version, request.weight_version + 1)
    if check_number("grad_norm", result.grad_norm) < 0:
        raise spi.ContractError(f"grad_norm: found {result.grad_norm}; expected at least 0")
    check_number("learning_rate", result.learning_rate)
    if request.gradient_norms:
        check_metrics("gradient_norms", result.gradient_norms)
    elif result.gradient_norms is not None:
        raise spi.ContractError("gradient_norms: found some; expected None, since they were not asked for")


def _check_gradients(
    request: spi.TrainStepRequest | spi.ForwardBackwardRequest,
    result: spi.TrainStepResult | spi.ForwardBackwardResult,
    dtype: str,
) -> None:
    check_number("loss", result.loss)
    check_metrics("metrics", result.metrics)
    mismatch = {*spi.MISMATCH_METRICS} if request.loss.generation_mismatch else set[str]()
    if missing := sorted(mismatch - result.metrics.keys()):
        raise spi.ContractError(
            f"metrics: found no {', '.join(missing)}; expected them: LossSpec.generation_mismatch asks for them"
        )
    check_own_names("metrics", result.metrics.keys() - mismatch)
    if request.logprobs:
        check_token_arrays("logprobs", result.logprobs, request.microbatches, dtype, upper=TOLERANCE)
    elif result.logprobs is not None:
        raise spi.ContractError("logprobs: found arrays; expected None, since they were not asked for")


def check_logprobs(request: spi.LogprobsRequest, result: spi.LogprobsResult, dtype: str) -> None:
    """Raise unless each microbatch has its log-probabilities, and the entropy that was asked for."""
    check_version(result.weight_version, request.weight_version)
    check_token_arrays("logprobs", result.logprobs, request.microbatches, dtype, upper=TOLERANCE)
    if request.entropy:
        check_token_arrays("entropy", result.entropy, request.microbatches, dtype, lower=-TOLERANCE)
    elif result.entropy is not None:
        raise spi.ContractError("entropy: found arrays; expected None, since it was not asked for")


def check_values(request: spi.ValuesRequest, result: spi.ValuesResult, dtype: str) -> None:
    """Raise unless each microbatch has its values."""
    check_version(result.weight_version, request.weight_version)
    check_token_arrays("values", result.values, request.microbatches, dtype, has_firsts=True)


def check_export(request: spi.ExportWeightsRequest, export: spi.WeightExport) -> None:
    """ContractError unless an export is that of its request."""
    check_version(export.weight_version, request.weight_version)
    if type(export.persistent) is not bool:
        raise spi.ContractError(f"persistent: found {export.persistent!r}; expected True or False")
    check_specs(export)
    if (export.shards is not None) != request.sharded:
        raise spi.ContractError(f"shards: found {type(export.shards).__name__} with sharded = {request.sharded}")
    wrong = next((spec for spec in export.specs if spec.dtype != request.dtype and not spec.keeps_dtype), None)
    if wrong is not None:
        raise spi.ContractError(f"specs: {wrong.name} is of {wrong.dtype}; expected {request.dtype} as requested")


def check_version(found: object, expected: int) -> None:
    """ContractError unless a version is the one expected."""
    if check_int("weight_version", found, at_least=0) != expected:
        raise spi.ContractError(f"weight_version: found {found}; expected {expected}")
