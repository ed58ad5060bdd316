"""The typed handle of a trainer."""

from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar

from rlcore.registry.checks import (
    TOLERANCE,
    check_int,
    check_metrics,
    check_number,
    check_own_names,
    check_record,
    check_specs,
    check_token_arrays,
    checked_export,
    require_loss,
)
from rlcore.registry.discovery import Entry
from rlcore.registry.handle import BackendHandle
from rlcore.registry.hooks import CallRecord
from rlcore.spi import capabilities
from rlcore.spi.batch import GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, ROUTED_EXPERTS, TokenBatch
from rlcore.spi.errors import BoundError, ContractError, NonFiniteError
from rlcore.spi.lifecycle import LoadStateRequest, LoadStateResult, SetResidencyRequest, SetResidencyResult
from rlcore.spi.loss import MISMATCH_METRICS
from rlcore.spi.trainer import (
    SPLIT_HOOKS,
    ExportWeightsRequest,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    LogprobsRequest,
    LogprobsResult,
    OptimStepRequest,
    OptimStepResult,
    TrainerLayout,
    TrainStepRequest,
    TrainStepResult,
    UseAdapterRequest,
    UseAdapterResult,
    ValuesRequest,
    ValuesResult,
)
from rlcore.spi.weights import Head, WeightExport

_NO_TOKENS = 'a trainer with the head "value" has no distribution over tokens'

_NO_POLICY = "expected get_logprobs of the reference alone: it was built without a policy (context.needs_policy = False)"


class TrainerHandle(BackendHandle):
    """A trainer, bound; every rank's driver side holds one."""

    state_changing: ClassVar[frozenset[str]] = BackendHandle.state_changing | {"train_step", *SPLIT_HOOKS, "use_adapter"}

    def __init__(
        self,
        entry: Entry,
        hooks: Any,
        record: CallRecord,
        layout: TrainerLayout,
        head: Head = "tokens",
        *,
        has_policy: bool = True,
        has_whole_step: bool = True,
    ) -> None:
        super().__init__(entry, hooks, record)
        self.layout = layout
        self.head: Head = head
        self._has_policy = has_policy
        self._has_whole_step = has_whole_step
        self._pieces = 0
        self._adapter = ""
        self._parked: dict[str, tuple[int | None, int]] = {}
        """Weight version, and pieces of a step under way, of each adapter when it was last in use."""

    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        """Make one optimizer step. NonFiniteError where the loss, a gradient or a metric is NaN or infinite, BoundError where a
        metric exceeds its bound."""
        self._require_legal("train_step", request, TrainStepRequest)
        self._require_piece("train_step", request, {capabilities.METRIC_BOUNDS: bool(request.bounds), **_of_update(request)})
        self._pieces = 0
        if not self._has_whole_step:
            return self._step_of_one_piece(request)
        result = self._call("train_step", request, TrainStepResult, lambda result: _check_step(request, result))
        self._state.weight_version = result.weight_version
        return result

    def _step_of_one_piece(self, request: TrainStepRequest) -> TrainStepResult:
        """Return the result of a step of a backend that has the split alone."""
        same = {name: getattr(request, name) for name in ("microbatches", "counts", "loss", "temperature", "weight_version")}
        piece = self.forward_backward(ForwardBackwardRequest(**same, logprobs=request.logprobs))
        exceeded = {name: value for name, value in piece.metrics.items() if value > request.bounds.get(name, inf)}
        if exceeded:
            self._pieces = 0
            shown = ", ".join(f"the metric {name} is {value:.6g}" for name, value in exceeded.items())
            raise BoundError(
                f"{self.entry.label}: train_step: {shown}; expected at most {request.bounds}. State kept", exceeded
            )
        asked = {name: getattr(request, name) for name in ("weight_version", "schedule_step", "gradient_norms")}
        step = self.optim_step(OptimStepRequest(pieces=1, **asked))
        figures = {name: getattr(step, name) for name in ("weight_version", "grad_norm", "learning_rate", "gradient_norms")}
        return TrainStepResult(**figures, loss=piece.loss, metrics={**piece.metrics, **step.metrics}, logprobs=piece.logprobs)

    def forward_backward(self, request: ForwardBackwardRequest) -> ForwardBackwardResult:
        """Add the gradients of a piece of a step. NonFiniteError where the loss or a metric is NaN or infinite."""
        self._require_legal("forward_backward", request, ForwardBackwardRequest)
        self._require_piece("forward_backward", request, {capabilities.SPLIT_STEP: True})
        if request.piece:
            self._require_pieces("forward_backward", request.piece)
        self._pieces = 0  # an error drops the gradients of all pieces
        result = self._call("forward_backward", request, ForwardBackwardResult, lambda result: _check_piece(request, result))
        self._pieces = request.piece + 1
        return result

    def optim_step(self, request: OptimStepRequest) -> OptimStepResult:
        """Make one optimizer step of the gradients held. NonFiniteError where one is NaN or infinite."""
        self._require_legal("optim_step", request, OptimStepRequest)
        self._require_capabilities("optim_step", {capabilities.SPLIT_STEP: True, **_of_update(request)})
        self._state.require_version("optim_step", request.weight_version)
        self._require_pieces("optim_step", request.pieces)
        _check_settings(request)
        self._pieces = 0
        result = self._call("optim_step", request, OptimStepResult, lambda result: _check_optim_step(request, result))
        self._state.weight_version = result.weight_version
        return result

    def use_adapter(self, request: UseAdapterRequest) -> UseAdapterResult:
        """Change to another adapter. ContractError where it was never begun, or is among those to forget."""
        self._require_legal("use_adapter", request, UseAdapterRequest)
        self._require_capabilities("use_adapter", {capabilities.MANY_ADAPTERS: True})
        self._parked[self._adapter] = self._state.weight_version, self._pieces
        for name in (*request.drops, *(() if request.seed is not None else [request.name])):
            if name not in self._parked or name == request.name in request.drops:
                found = f"no adapter {name!r} to use, or one in use to forget"
                expected = f"any of {', '.join(map(repr, self._parked))}. Begin one with a seed"
                raise ContractError(f"{self.entry.label}: use_adapter: found {found}; expected {expected}")
        result = self._call("use_adapter", request, UseAdapterResult, lambda result: self._check_adapter(request, result))
        self._adapter = request.name
        self._pieces = 0 if request.seed is not None else self._parked[request.name][1]
        self._state.weight_version = result.weight_version
        for name in request.drops:
            self._parked.pop(name, None)
        return result

    def _check_adapter(self, request: UseAdapterRequest, result: UseAdapterResult) -> None:
        expected = 0 if request.seed is not None else self._parked[request.name][0]
        if expected is not None:
            _check_version(result.weight_version, expected)

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what the trainer holds; gradients of pieces are dropped."""
        self._pieces = 0
        self._parked = {name: (version, 0) for name, (version, _) in self._parked.items()}
        return super().set_residency(request)

    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        """Restore a state; gradients of pieces are dropped."""
        self._require_capabilities("load_state", {capabilities.SPLIT_STEP: not request.optimizer})
        self._pieces = 0
        return super().load_state(request)

    def get_logprobs(self, request: LogprobsRequest) -> LogprobsResult:
        """Log-probabilities of the given tokens; NonFiniteError where one is NaN or infinite."""
        self._require_legal("get_logprobs", request, LogprobsRequest)
        self._require_head("get_logprobs", "tokens")
        if not self._has_policy and request.model == "policy":
            raise ContractError(f'{self.entry.label}: get_logprobs(model="policy"); {_NO_POLICY}')
        self._require_batches("get_logprobs", request.microbatches, request.temperature, request.weight_version)
        needed = {capabilities.REFERENCE_POLICY: request.model == "reference", capabilities.ENTROPY: request.entropy}
        self._require_capabilities("get_logprobs", needed)
        result = self._call("get_logprobs", request, LogprobsResult, lambda result: _check_logprobs(request, result))
        self._state.weight_version = result.weight_version
        return result

    def get_values(self, request: ValuesRequest) -> ValuesResult:
        """Values after the given tokens; NonFiniteError where one is NaN or infinite."""
        self._require_legal("get_values", request, ValuesRequest)
        self._require_head("get_values", "value")
        self._require_batches("get_values", request.microbatches, 1.0, request.weight_version)
        result = self._call("get_values", request, ValuesResult, lambda result: _check_values(request, result))
        self._state.weight_version = result.weight_version
        return result

    def export_weights(self, request: ExportWeightsRequest) -> WeightExport:
        """Stream the weights. The buckets check themselves as they are read, and raise ContractError then."""
        self._require_legal("export_weights", request, ExportWeightsRequest)
        needed = {
            capabilities.ADAPTER_REFIT: request.adapters != "merged",
            capabilities.DELTA_REFIT: request.delta != "off",
            capabilities.SHARDS: request.sharded,
        }
        self._require_capabilities("export_weights", needed)
        self._state.require_version("export_weights", request.weight_version)
        export = self._call("export_weights", request, WeightExport, lambda export: _check_export(request, export))
        self._state.weight_version = export.weight_version
        return checked_export(export, self.entry.label, request.max_bucket_bytes)

    def _require_legal(self, hook: str, request: object, expected: type) -> None:
        super()._require_legal(hook, request, expected)
        if not self._has_policy and hook not in ("get_logprobs", "set_residency"):
            raise ContractError(f"{self.entry.label}: {hook}; {_NO_POLICY}")

    def _harmless(self, hook: str, error: BaseException) -> bool:
        is_step = hook in ("train_step", *SPLIT_HOOKS, "use_adapter")
        refused = is_step and isinstance(error, BoundError | NonFiniteError | ContractError)
        return refused or super()._harmless(hook, error)

    def _require_piece(
        self, hook: str, request: TrainStepRequest | ForwardBackwardRequest, besides: Mapping[str, bool]
    ) -> None:
        """Refuse a request for gradients that the trainer cannot compute, or whose data is incomplete."""
        self._require_batches(hook, request.microbatches, request.temperature, request.weight_version)
        needed = {
            capabilities.ENTROPY: request.loss.entropy != "none",
            capabilities.PREVIOUS_LOGPROBS: request.loss.previous_logprobs != "absent",
            capabilities.STEP_LOGPROBS: request.logprobs,
        }
        self._require_capabilities(hook, {**needed, **besides})
        if self.head == "value":
            self._require_no_logprobs(hook, request)
        self._require_columns(request)
        require_loss(request.loss.path)

    def _require_pieces(self, hook: str, expected: int) -> None:
        """ContractError unless the trainer holds the gradients of so many pieces, at least one."""
        if self._pieces != expected or expected < 1:
            found = f"the gradients of {self._pieces} pieces of a step"
            asked = "one piece or more" if expected < 1 else f"those of {expected}"
            remedy = "Begin the step anew with piece = 0; an error, a move or a load drops gradients"
            raise ContractError(f"{self.entry.label}: {hook} found {found}; expected {asked}. {remedy}")

    def _require_batches(self, hook: str, microbatches: object, temperature: float, weight_version: int) -> None:
        if not isinstance(microbatches, tuple) or not microbatches:
            raise ContractError(f"{self.entry.label}: {hook} takes a tuple of at least one microbatch; found {microbatches!r}")
        for microbatch in microbatches:
            check_record(microbatch, TokenBatch)
        is_routed = any(ROUTED_EXPERTS in microbatch.token_columns for microbatch in microbatches)
        has_tokens = self.head != "value"
        masks = [(one.sampling_mask, one.tokens) for one in microbatches if has_tokens and one.sampling_mask is not None]
        needed = {capabilities.ROUTING_REPLAY: is_routed, capabilities.SAMPLING_MASK_REPLAY: bool(masks)}
        needed[capabilities.IMAGES] = any(one.images is not None for one in microbatches)
        self._require_capabilities(hook, needed)
        for mask, tokens in masks:
            mask.check(tokens)
        if is_routed and not has_tokens:
            raise ContractError(f"{self.entry.label}: {hook} with the column {ROUTED_EXPERTS}; expected none: {_NO_TOKENS}")
        if not temperature > 0:
            raise ContractError(f"{self.entry.label}: {hook} takes a positive temperature; found {temperature}")
        self._state.require_version(hook, weight_version)

    def _require_head(self, hook: str, head: Head) -> None:
        if self.head != head:
            raise ContractError(f'{self.entry.label}: {hook} of a trainer with the head "{self.head}"; expected "{head}"')

    def _require_no_logprobs(self, hook: str, request: TrainStepRequest | ForwardBackwardRequest) -> None:
        """Refuse requests for log-probabilities from a trainer of values."""
        asked = {
            'loss.entropy "none"': request.loss.entropy != "none",
            'loss.previous_logprobs "absent"': request.loss.previous_logprobs != "absent",
            "no loss.generation_mismatch": request.loss.generation_mismatch,
            "no request.logprobs": request.logprobs,
        }
        if expected := ", ".join(name for name, is_asked in asked.items() if is_asked):
            raise ContractError(f"{self.entry.label}: {hook} asks for more than values; expected {expected}: {_NO_TOKENS}")

    def _require_columns(self, request: TrainStepRequest | ForwardBackwardRequest) -> None:
        """Every column that the loss reads."""
        loss = request.loss
        declared = {PREVIOUS_LOGPROBS: loss.previous_logprobs == "given", GENERATION_LOGPROBS: loss.generation_mismatch}
        needed = {*loss.token_columns, *(name for name, is_needed in declared.items() if is_needed)}
        for index, microbatch in enumerate(request.microbatches):
            missing = ", ".join(sorted(needed - microbatch.token_columns.keys()))
            if missing:
                raise ContractError(f"{self.entry.label}: microbatch {index} lacks {missing}, which the loss {loss.path} reads")


def _of_update(request: TrainStepRequest | OptimStepRequest) -> dict[str, bool]:
    schedules = request.schedule_step != request.weight_version
    return {capabilities.SCHEDULE_STEP: schedules, capabilities.GRADIENT_NORMS: request.gradient_norms}


def _check_step(request: TrainStepRequest, result: TrainStepResult) -> None:
    _check_update(request, result)
    _check_gradients(request, result)
    for name, bound in request.bounds.items():
        if name in result.metrics and result.metrics[name] > bound:
            found = f"{result.metrics[name]}, above its bound {bound}"
            raise ContractError(f"metrics[{name!r}]: found {found}; expected the step refused with BoundError")


def _check_piece(request: ForwardBackwardRequest, result: ForwardBackwardResult) -> None:
    _check_version(result.weight_version, request.weight_version)
    _check_gradients(request, result)


def _check_optim_step(request: OptimStepRequest, result: OptimStepResult) -> None:
    _check_update(request, result)
    check_metrics("metrics", result.metrics)
    check_own_names("metrics", result.metrics.keys())


def _check_settings(request: OptimStepRequest) -> None:
    """ContractError where a setting is none that AdamW takes."""
    at_least_0 = {"learning_rate": request.learning_rate, "eps": request.eps, "max_grad_norm": request.max_grad_norm}
    for name, value in {**at_least_0, "weight_decay": request.weight_decay}.items():
        if value is not None and not check_number(name, value) >= 0:
            raise ContractError(f"optim_step: {name}: found {value}; expected at least 0")
    betas = (0.0, 0.0) if request.betas is None else request.betas
    if len(betas) != 2 or not all(0 <= check_number("betas", beta) < 1 for beta in betas):
        raise ContractError(f"optim_step: betas: found {betas}; expected two numbers from 0 to below 1")


def _check_update(request: TrainStepRequest | OptimStepRequest, result: TrainStepResult | OptimStepResult) -> None:
    _check_version(result.weight_version, request.weight_version + 1)
    if check_number("grad_norm", result.grad_norm) < 0:
        raise ContractError(f"grad_norm: found {result.grad_norm}; expected at least 0")
    check_number("learning_rate", result.learning_rate)
    if request.gradient_norms:
        check_metrics("gradient_norms", result.gradient_norms)
    elif result.gradient_norms is not None:
        raise ContractError("gradient_norms: found some; expected None, since they were not asked for")


def _check_gradients(
    request: TrainStepRequest | ForwardBackwardRequest, result: TrainStepResult | ForwardBackwardResult
) -> None:
    check_number("loss", result.loss)
    check_metrics("metrics", result.metrics)
    mismatch = {*MISMATCH_METRICS} if request.loss.generation_mismatch else set[str]()
    if missing := sorted(mismatch - result.metrics.keys()):
        raise ContractError(
            f"metrics: found no {', '.join(missing)}; expected them: LossSpec.generation_mismatch asks for them"
        )
    check_own_names("metrics", result.metrics.keys() - mismatch)
    if request.logprobs:
        check_token_arrays("logprobs", result.logprobs, request.microbatches, upper=TOLERANCE)
    elif result.logprobs is not None:
        raise ContractError("logprobs: found arrays; expected None, since they were not asked for")


def _check_logprobs(request: LogprobsRequest, result: LogprobsResult) -> None:
    _check_version(result.weight_version, request.weight_version)
    check_token_arrays("logprobs", result.logprobs, request.microbatches, upper=TOLERANCE)
    if request.entropy:
        check_token_arrays("entropy", result.entropy, request.microbatches, lower=-TOLERANCE)
    elif result.entropy is not None:
        raise ContractError("entropy: found arrays; expected None, since it was not asked for")


def _check_values(request: ValuesRequest, result: ValuesResult) -> None:
    _check_version(result.weight_version, request.weight_version)
    check_token_arrays("values", result.values, request.microbatches, has_firsts=True)


def _check_export(request: ExportWeightsRequest, export: WeightExport) -> None:
    _check_version(export.weight_version, request.weight_version)
    if type(export.persistent) is not bool:
        raise ContractError(f"persistent: found {export.persistent!r}; expected True or False")
    check_specs(export)
    if (export.shards is not None) != request.sharded:
        raise ContractError(f"shards: found {type(export.shards).__name__} with sharded = {request.sharded}")
    wrong = next((spec for spec in export.specs if spec.dtype != request.dtype and not spec.keeps_dtype), None)
    if wrong is not None:
        raise ContractError(f"specs: {wrong.name} is of {wrong.dtype}; expected {request.dtype} as requested")


def _check_version(found: object, expected: int) -> None:
    if check_int("weight_version", found, at_least=0) != expected:
        raise ContractError(f"weight_version: found {found}; expected {expected}")
