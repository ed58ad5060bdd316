"""The typed handle of a trainer."""

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
from rlcore.spi.loss import MISMATCH_METRICS
from rlcore.spi.trainer import (
    ExportWeightsRequest,
    LogprobsRequest,
    LogprobsResult,
    TrainerLayout,
    TrainStepRequest,
    TrainStepResult,
    ValuesRequest,
    ValuesResult,
)
from rlcore.spi.weights import Head, WeightExport

_NO_TOKENS = 'a trainer with the head "value" has no distribution over tokens'

_NO_POLICY = "expected get_logprobs of the reference alone: it was built without a policy (context.needs_policy = False)"


class TrainerHandle(BackendHandle):
    """A trainer, bound; every rank's driver side holds one."""

    state_changing: ClassVar[frozenset[str]] = BackendHandle.state_changing | {"train_step"}

    def __init__(
        self,
        entry: Entry,
        hooks: Any,
        record: CallRecord,
        layout: TrainerLayout,
        head: Head = "tokens",
        *,
        has_policy: bool = True,
    ) -> None:
        super().__init__(entry, hooks, record)
        self.layout = layout
        self.head: Head = head
        self._has_policy = has_policy

    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        """Make one optimizer step. NonFiniteError where the loss, a gradient or a metric is NaN or infinite, BoundError where a
        metric exceeds its bound."""
        self._require_legal("train_step", request, TrainStepRequest)
        self._require_batches("train_step", request.microbatches, request.temperature, request.weight_version)
        needed = {
            capabilities.ENTROPY: request.loss.entropy != "none",
            capabilities.METRIC_BOUNDS: bool(request.bounds),
            capabilities.PREVIOUS_LOGPROBS: request.loss.previous_logprobs != "absent",
            capabilities.STEP_LOGPROBS: request.logprobs,
            capabilities.SCHEDULE_STEP: request.schedule_step != request.weight_version,
        }
        self._require_capabilities("train_step", needed)
        if self.head == "value":
            self._require_no_logprobs(request)
        self._require_columns(request)
        require_loss(request.loss.path)
        result = self._call("train_step", request, TrainStepResult, lambda result: _check_step(request, result))
        self._state.weight_version = result.weight_version
        return result

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
        refused = hook == "train_step" and isinstance(error, BoundError | NonFiniteError | ContractError)
        return refused or super()._harmless(hook, error)

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

    def _require_no_logprobs(self, request: TrainStepRequest) -> None:
        """Refuse requests for log-probabilities from a trainer of values."""
        asked = {
            'loss.entropy "none"': request.loss.entropy != "none",
            'loss.previous_logprobs "absent"': request.loss.previous_logprobs != "absent",
            "no loss.generation_mismatch": request.loss.generation_mismatch,
            "no request.logprobs": request.logprobs,
        }
        if expected := ", ".join(name for name, is_asked in asked.items() if is_asked):
            raise ContractError(f"{self.entry.label}: train_step asks for more than values; expected {expected}: {_NO_TOKENS}")

    def _require_columns(self, request: TrainStepRequest) -> None:
        """Every column that the loss reads."""
        loss = request.loss
        declared = {PREVIOUS_LOGPROBS: loss.previous_logprobs == "given", GENERATION_LOGPROBS: loss.generation_mismatch}
        needed = {*loss.token_columns, *(name for name, is_needed in declared.items() if is_needed)}
        for index, microbatch in enumerate(request.microbatches):
            missing = ", ".join(sorted(needed - microbatch.token_columns.keys()))
            if missing:
                raise ContractError(f"{self.entry.label}: microbatch {index} lacks {missing}, which the loss {loss.path} reads")


def _check_step(request: TrainStepRequest, result: TrainStepResult) -> None:
    _check_version(result.weight_version, request.weight_version + 1)
    check_number("loss", result.loss)
    if check_number("grad_norm", result.grad_norm) < 0:
        raise ContractError(f"grad_norm: found {result.grad_norm}; expected at least 0")
    check_number("learning_rate", result.learning_rate)
    check_metrics("metrics", result.metrics)
    mismatch = {*MISMATCH_METRICS} if request.loss.generation_mismatch else set[str]()
    if missing := sorted(mismatch - result.metrics.keys()):
        raise ContractError(
            f"metrics: found no {', '.join(missing)}; expected them: LossSpec.generation_mismatch asks for them"
        )
    check_own_names("metrics", result.metrics.keys() - mismatch)
    for name, bound in request.bounds.items():
        if name in result.metrics and result.metrics[name] > bound:
            found = f"{result.metrics[name]}, above its bound {bound}"
            raise ContractError(f"metrics[{name!r}]: found {found}; expected the step refused with BoundError")
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
