"""The typed handle of a trainer."""

from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar

from rlcore.registry.checks import check_int, check_record, checked_export, require_loss
from rlcore.registry.discovery import Entry
from rlcore.registry.handle import BackendHandle
from rlcore.registry.hooks import CallRecord
from rlcore.registry.trainer_checks import (
    check_export,
    check_logprobs,
    check_optim_step,
    check_piece,
    check_pieces,
    check_settings,
    check_step,
    check_values,
    check_version,
)
from rlcore.spi import capabilities
from rlcore.spi.batch import GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, ROUTED_EXPERTS, TokenBatch
from rlcore.spi.context import TrainerContext
from rlcore.spi.errors import BoundError, ContractError, NonFiniteError
from rlcore.spi.lifecycle import LoadStateRequest, LoadStateResult, SetResidencyRequest, SetResidencyResult
from rlcore.spi.trainer import (
    SPLIT_HOOKS,
    ExportWeightsRequest,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardBackwardTogetherRequest,
    ForwardBackwardTogetherResult,
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

_STEP_HOOKS = frozenset({"train_step", *SPLIT_HOOKS, "use_adapter", "forward_backward_together"})
_NO_POLICY = "expected get_logprobs of the reference alone: it was built without a policy (context.needs_policy = False)"


class TrainerHandle(BackendHandle):
    """A trainer, bound; every rank's driver side holds one."""

    state_changing: ClassVar[frozenset[str]] = BackendHandle.state_changing | _STEP_HOOKS

    def __init__(
        self, entry: Entry, hooks: Any, record: CallRecord, layout: TrainerLayout, context: TrainerContext, has_whole_step: bool
    ) -> None:
        super().__init__(entry, hooks, record)
        self.layout = layout
        self.head: Head = context.head
        self._has_policy, self._lora = context.needs_policy, context.lora
        self._has_whole_step = has_whole_step
        self._dtype = "float64" if context.model.dtype == "float64" else "float32"
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
        result = self._call("train_step", request, TrainStepResult, lambda found: check_step(request, found, self._dtype))
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
        self._require_next_piece("forward_backward", request)
        self._pieces = 0  # an error drops the gradients of all pieces
        result = self._call(
            "forward_backward", request, ForwardBackwardResult, lambda found: check_piece(request, found, self._dtype)
        )
        self._pieces = request.piece + 1
        return result

    def _require_next_piece(self, hook: str, request: ForwardBackwardRequest) -> None:
        self._require_piece(hook, request, {capabilities.SPLIT_STEP: True})
        if request.piece:
            self._require_pieces(hook, request.piece)

    def forward_backward_together(self, request: ForwardBackwardTogetherRequest) -> ForwardBackwardTogetherResult:
        """Add a piece to the gradients of each of several adapters. An error leaves all as they were. A trainer without
        `adapters_together` computes by turns: an error drops those of these adapters."""
        hook, used = "forward_backward_together", self._adapter
        self._require_legal(hook, request, ForwardBackwardTogetherRequest)
        self._require_capabilities(hook, {capabilities.MANY_ADAPTERS: True})
        self._parked[used] = self._state.weight_version, self._pieces
        if not request.pieces or not request.pieces.keys() <= self._parked.keys():
            found, expected = ", ".join(map(repr, request.pieces)), ", ".join(map(repr, self._parked))
            raise ContractError(f"{self.entry.label}: {hook}: found the adapters ({found}); expected some of {expected}")
        try:
            for name, piece in request.pieces.items():
                self._state.weight_version, self._pieces = self._parked[name]
                self._require_next_piece(hook, piece)
        finally:
            self._state.weight_version, self._pieces = self._parked[used]
        if not self.has(capabilities.ADAPTERS_TOGETHER):
            return self._by_turns(request)
        result = self._call(
            hook, request, ForwardBackwardTogetherResult, lambda found: check_pieces(request, found, self._dtype)
        )
        self._parked |= {name: (piece.weight_version, piece.piece + 1) for name, piece in request.pieces.items()}
        self._state.weight_version, self._pieces = self._parked[used]
        return result

    def _by_turns(self, request: ForwardBackwardTogetherRequest) -> ForwardBackwardTogetherResult:
        used, results = self._adapter, dict[str, ForwardBackwardResult]()
        try:
            for name, piece in request.pieces.items():
                self.use_adapter(UseAdapterRequest(name=name))
                results[name] = self.forward_backward(piece)
        except BaseException:
            self._pieces = 0
            self._parked |= {name: (self._parked[name][0], 0) for name in request.pieces}
            raise
        finally:
            if self.is_usable:
                self.use_adapter(UseAdapterRequest(name=used))
        return ForwardBackwardTogetherResult(pieces=results)

    def optim_step(self, request: OptimStepRequest) -> OptimStepResult:
        """Make one optimizer step of the gradients held. NonFiniteError where one is NaN or infinite."""
        self._require_legal("optim_step", request, OptimStepRequest)
        self._require_capabilities("optim_step", {capabilities.SPLIT_STEP: True, **_of_update(request)})
        self._state.require_version("optim_step", request.weight_version)
        self._require_pieces("optim_step", request.pieces)
        check_settings(request)
        self._pieces = 0
        result = self._call("optim_step", request, OptimStepResult, lambda result: check_optim_step(request, result))
        self._state.weight_version = result.weight_version
        return result

    def use_adapter(self, request: UseAdapterRequest) -> UseAdapterResult:
        """Change to another adapter. ContractError where it was never begun, or is among those to forget."""
        self._require_legal("use_adapter", request, UseAdapterRequest)
        self._require_capabilities("use_adapter", {capabilities.MANY_ADAPTERS: True})
        self._require_rank(request)
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

    def _require_rank(self, request: UseAdapterRequest) -> None:
        """ContractError unless the trainer can begin an adapter of this rank."""
        if request.rank is None or self._lora is None:
            return
        most = self._lora.rank
        least = 1 if self._lora.init_from is None else most  # files have one rank
        if request.seed is None or not least <= check_int("rank", request.rank, at_least=0) <= most:
            found = f"rank {request.rank}" + (" without a seed" if request.seed is None else "")
            raise ContractError(f"{self.entry.label}: use_adapter: found {found}; expected {least} to {most}, and a seed")

    def _check_adapter(self, request: UseAdapterRequest, result: UseAdapterResult) -> None:
        expected = 0 if request.seed is not None else self._parked[request.name][0]
        if expected is not None:
            check_version(result.weight_version, expected)

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
        result = self._call("get_logprobs", request, LogprobsResult, lambda found: check_logprobs(request, found, self._dtype))
        self._state.weight_version = result.weight_version
        return result

    def get_values(self, request: ValuesRequest) -> ValuesResult:
        """Values after the given tokens; NonFiniteError where one is NaN or infinite."""
        self._require_legal("get_values", request, ValuesRequest)
        self._require_head("get_values", "value")
        self._require_batches("get_values", request.microbatches, 1.0, request.weight_version)
        result = self._call("get_values", request, ValuesResult, lambda found: check_values(request, found, self._dtype))
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
        export = self._call("export_weights", request, WeightExport, lambda export: check_export(request, export))
        self._state.weight_version = export.weight_version
        return checked_export(export, self.entry.label, request.max_bucket_bytes)

    def _require_legal(self, hook: str, request: object, expected: type) -> None:
        super()._require_legal(hook, request, expected)
        if not self._has_policy and hook not in ("get_logprobs", "set_residency"):
            raise ContractError(f"{self.entry.label}: {hook}; {_NO_POLICY}")

    def _harmless(self, hook: str, error: BaseException) -> bool:
        refused = hook in _STEP_HOOKS and isinstance(error, BoundError | NonFiniteError | ContractError)
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
