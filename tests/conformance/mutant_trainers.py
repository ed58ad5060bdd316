"""Trainers that are each wrong in one known way, made from the fake; each names the check that has to fail."""

from contextlib import suppress

import numpy as np
from attrs import evolve
from mutants import killed_by

from rlcore.spi import BoundError, CheckpointError, NonFiniteError, SamplingMask, hookimpl
from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore.testing.fakes.policy import Contexts, Forward
from rlcore.testing.fakes.trainer import FakeTrainer, cut_into_buckets


def firsts_zeroed(values, batch):
    values = values.copy()
    values[batch.offsets[:-1]] = 0.0
    return values


def position_of_tokens(batch):
    return np.arange(batch.num_tokens) - np.repeat(batch.offsets[:-1], batch.lengths)


@killed_by("test_logprobs_equal_the_reference")
class ShiftedLogprobs(FakeTrainer):
    def evaluate(self, weights, batch, temperature):
        logprobs, entropy = super().evaluate(weights, batch, temperature)
        return firsts_zeroed(np.roll(logprobs, -1), batch), entropy


@killed_by("test_logprobs_equal_the_reference")
class LogprobsOnlyWhereMasked(FakeTrainer):
    def evaluate(self, weights, batch, temperature):
        logprobs, entropy = super().evaluate(weights, batch, temperature)
        return np.where(batch.loss_mask, logprobs, 0.0), entropy


@killed_by("test_logprobs_equal_the_reference")
class TemperatureIgnoredInLogprobs(FakeTrainer):
    def evaluate(self, weights, batch, temperature):
        return super().evaluate(weights, batch, 1.0)


@killed_by("test_logprobs_do_not_depend_on_the_microbatches")
class SequencesSeeTheOneBefore(FakeTrainer):
    def forward(self, weights, batch, temperature):
        contexts = Contexts.of(batch.tokens, batch.offsets, self.config.vocab_size)
        leaked = np.full_like(contexts.first, batch.tokens[0])
        return Forward.of(weights, evolve(contexts, first=leaked), temperature)


@killed_by("test_logprobs_equal_the_reference")
class PositionsRunOnOverSequences(FakeTrainer):
    def forward(self, weights, batch, temperature):
        running = np.flatnonzero(~np.isin(np.arange(batch.num_tokens), batch.offsets[:-1]))
        starts = np.repeat(batch.offsets[:-1], batch.lengths)[running]
        contexts = Contexts.of(batch.tokens, batch.offsets, self.config.vocab_size)
        separate = evolve(
            contexts,
            which=np.arange(len(running)),
            first=batch.tokens[starts].astype(np.int64),
            previous=batch.tokens[running - 1].astype(np.int64),
            position=running,
        )
        return Forward.of(weights, separate, temperature)


@killed_by("test_long_sequences_equal_the_reference")
class LogprobsEndAtToken48(FakeTrainer):
    def evaluate(self, weights, batch, temperature):
        logprobs, entropy = super().evaluate(weights, batch, temperature)
        return np.where(position_of_tokens(batch) < 48, logprobs, 0.0), entropy


@killed_by("test_long_sequences_equal_the_reference")
class PositionsRestartAtToken33(FakeTrainer):
    def forward(self, weights, batch, temperature):
        position = position_of_tokens(batch)
        later = np.flatnonzero(position > 0)
        contexts = Contexts.of(batch.tokens, batch.offsets, self.config.vocab_size)
        separate = evolve(
            contexts,
            which=np.arange(len(later)),
            first=batch.tokens[later - position[later]].astype(np.int64),
            previous=batch.tokens[later - 1].astype(np.int64),
            position=position[later] % 33,
        )
        return Forward.of(weights, separate, temperature)


@killed_by("test_long_sequences_equal_the_reference")
class LossEndsAtToken64(FakeTrainer):
    """In training alone."""

    def call_loss(self, request, batch, forward):
        return super().call_loss(request, evolve(batch, loss_mask=batch.loss_mask & (position_of_tokens(batch) < 64)), forward)


@killed_by("test_entropy_equals_the_reference")
class EntropyInBits(FakeTrainer):
    def evaluate(self, weights, batch, temperature):
        logprobs, entropy = super().evaluate(weights, batch, temperature)
        return logprobs, entropy / np.log(2)


@killed_by("test_entropy_equals_the_reference")
class EntropyUntempered(FakeTrainer):
    def evaluate(self, weights, batch, temperature):
        return super().evaluate(weights, batch, temperature)[0], super().evaluate(weights, batch, 1.0)[1]


class ChangedRequest(FakeTrainer):
    def accumulate(self, request):
        return super().accumulate(self.changed(request))


@killed_by("test_loss_and_metrics_equal_the_reference")
class TemperatureIgnoredInTraining(ChangedRequest):
    def changed(self, request):
        return evolve(request, temperature=1.0)


@killed_by("test_loss_and_metrics_equal_the_reference")
class SwallowedMicrobatch(ChangedRequest):
    def changed(self, request):
        return evolve(request, microbatches=request.microbatches[:-1] or request.microbatches)


@killed_by("test_loss_and_metrics_equal_the_reference")
class MicrobatchOfOneSequenceLeftOut(ChangedRequest):
    def changed(self, request):
        kept = tuple(batch for batch in request.microbatches if batch.num_sequences > 1)
        return evolve(request, microbatches=kept or request.microbatches)


@killed_by("test_update_does_not_depend_on_the_microbatches")
class MicrobatchCountedTwice(ChangedRequest):
    def changed(self, request):
        extra = request.microbatches[1:2]
        return evolve(request, microbatches=request.microbatches + extra)


@killed_by("test_losses_are_divided_by_the_global_counts")
class CountsOfTheRank(ChangedRequest):
    def changed(self, request):
        found = [batch.counts() for batch in request.microbatches]
        counts = evolve(
            request.counts,
            num_loss_tokens=sum(part.num_loss_tokens for part in found),
            num_loss_sequences=sum(part.num_loss_sequences for part in found),
        )
        return evolve(request, counts=counts)


@killed_by("test_the_loss_sees_the_sequences_of_a_microbatch_in_their_order")
class SequencesByLength(ChangedRequest):
    """As those do that pad them."""

    def changed(self, request):
        ordered = (batch.select(np.argsort(batch.lengths, kind="stable")) for batch in request.microbatches)
        return evolve(request, microbatches=tuple(ordered))


@killed_by("test_update_does_not_depend_on_the_microbatches")
class CountsOfTheMicrobatch(FakeTrainer):
    def call_loss(self, request, batch, forward):
        counts = evolve(batch.counts(), num_loss_tokens=max(batch.counts().num_loss_tokens, 1), num_loss_sequences=1)
        return super().call_loss(evolve(request, counts=counts), batch, forward)


@killed_by("test_update_does_not_depend_on_the_microbatches")
class MeanOverMicrobatches(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        num_microbatches = len(request.microbatches)
        return loss / num_microbatches, metrics, {name: grad / num_microbatches for name, grad in grads.items()}


@killed_by("test_microbatch_without_loss_tokens_adds_nothing")
class EmptyMicrobatchEndsTheStep(ChangedRequest):
    def changed(self, request):
        empty = [index for index, batch in enumerate(request.microbatches) if not batch.loss_mask.any()]
        last = empty[0] + 1 if empty else len(request.microbatches)
        return evolve(request, microbatches=request.microbatches[:last])


@killed_by("test_loss_and_metrics_equal_the_reference")
class MaskIgnored(FakeTrainer):
    def call_loss(self, request, batch, forward):
        everywhere = np.ones(batch.num_tokens, np.bool_)
        everywhere[batch.offsets[:-1]] = False
        return super().call_loss(request, evolve(batch, loss_mask=everywhere), forward)


@killed_by("test_tokens_after_the_last_loss_token_get_no_gradient")
class EveryTokenLearned(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        for batch in request.microbatches:
            forward = self.forward(self.weights, batch, request.temperature)
            extra = np.full(batch.num_tokens, 0.1 / request.counts.num_loss_tokens)
            for name, grad in forward.gradients(self.weights, extra, np.zeros(batch.num_tokens)).items():
                grads[name] += grad
        return loss, metrics, grads


@killed_by("test_loss_and_metrics_equal_the_reference")
class MaximaOfTheLastMicrobatch(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        last = super().accumulate(evolve(request, microbatches=request.microbatches[-1:]))[1]
        return loss, {**metrics, "probe/largest_surprise": last["probe/largest_surprise"]}, grads


@killed_by("test_loss_and_metrics_equal_the_reference")
class MaximaStartAtZero(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        return loss, {name: max(value, 0.0) if "surprise" in name else value for name, value in metrics.items()}, grads


@killed_by("test_loss_and_metrics_equal_the_reference")
class MetricsDropped(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        return loss, dict(list(metrics.items())[1:]), grads


@killed_by("test_grad_norm_equals_the_reference")
class EntropyGradientUnderMetric(ChangedRequest):
    def changed(self, request):
        return evolve(request, loss=evolve(request.loss, entropy="loss"))


@killed_by("test_grad_norm_equals_the_reference")
class EntropyGradientDropped(ChangedRequest):
    def changed(self, request):
        return evolve(request, loss=evolve(request.loss, entropy="metric"))


@killed_by("test_grad_norm_equals_the_reference")
class GradNormAfterClipping(FakeTrainer):
    @hookimpl
    def train_step(self, request):
        result = super().train_step(request)
        return evolve(result, grad_norm=min(result.grad_norm, 0.1))


class ChangedLoss(FakeTrainer):
    def call_loss(self, request, batch, forward):
        return super().call_loss(evolve(request, loss=self.changed(request.loss)), batch, forward)


@killed_by("test_previous_logprobs_are_those_declared")
class PreviousLogprobsDropped(ChangedLoss):
    def changed(self, loss):
        return evolve(loss, previous_logprobs="absent")


@killed_by("test_previous_logprobs_are_those_declared")
class PreviousLogprobsAreTheCurrentOnes(ChangedLoss):
    def changed(self, loss):
        return evolve(loss, previous_logprobs="absent" if loss.previous_logprobs == "absent" else "unchanged")


@killed_by("test_previous_logprobs_are_those_declared")
class PreviousLogprobsOfTheColumnAlways(FakeTrainer):
    """Wherever there is one."""

    def call_loss(self, request, batch, forward):
        declared = "given" if "previous_logprobs" in batch.token_columns else request.loss.previous_logprobs
        return super().call_loss(evolve(request, loss=evolve(request.loss, previous_logprobs=declared)), batch, forward)


@killed_by("test_generation_mismatch_is_reported_for_any_loss")
class MismatchDropped(ChangedLoss):
    def changed(self, loss):
        return evolve(loss, generation_mismatch=False)


@killed_by("test_generation_mismatch_is_reported_for_any_loss")
class MismatchOfTheMicrobatch(FakeTrainer):
    """Its mean, where its part of the step's belongs."""

    def mismatch(self, batch, current, counts):
        return super().mismatch(batch, current, batch.counts())


@killed_by("test_generation_mismatch_is_reported_for_any_loss")
class MismatchOfAllTokens(FakeTrainer):
    def mismatch(self, batch, current, counts):
        return super().mismatch(evolve(batch, loss_mask=current != 0.0), current, counts)


@killed_by("test_learning_rate_is_the_one_used")
class LearningRateMisreported(FakeTrainer):
    @hookimpl
    def train_step(self, request):
        return evolve(super().train_step(request), learning_rate=0.0)


@killed_by("test_learning_rate_is_the_one_used")
class LearningRateNotApplied(FakeTrainer):
    def apply_gradients(self, grads, norm):
        return


@killed_by("test_steps_go_downhill")
class Uphill(FakeTrainer):
    def apply_gradients(self, grads, norm):
        super().apply_gradients({name: -grad for name, grad in grads.items()}, norm)


@killed_by("test_export_computes_what_the_trainer_computes")
class StaleLogprobs(FakeTrainer):
    @hookimpl
    def get_logprobs(self, request):
        kept = self.__dict__.setdefault("kept", {})
        key = (request.model, request.temperature, tuple(batch.tokens.tobytes() for batch in request.microbatches))
        kept.setdefault(key, super().get_logprobs(request))
        return evolve(kept[key], weight_version=self.weight_version)


class ChangedExport(FakeTrainer):
    """`previous` holds the weights before the last update."""

    def __init__(self, context, config):
        super().__init__(context, config)
        self.previous = self.copied()

    def apply_gradients(self, grads, norm):
        self.previous = self.copied()
        super().apply_gradients(grads, norm)

    def copied(self):
        return {name: value.copy() for name, value in self.weights.items()}


@killed_by("test_export_computes_what_the_trainer_computes")
class StaleExport(ChangedExport):
    @hookimpl
    def export_weights(self, request):
        export = super().export_weights(request)
        tensors = {name: value.astype(request.dtype) for name, value in self.previous.items()}
        return evolve(export, buckets=cut_into_buckets(tensors, request.max_bucket_bytes), persistent=False)


@killed_by("test_export_changes_with_the_weights")
class DigestsOfOldWeights(ChangedExport):
    @hookimpl
    def export_weights(self, request):
        export = super().export_weights(request)
        tensors = {name: value.astype(request.dtype) for name, value in self.previous.items()}
        old = cut_into_buckets(tensors, request.max_bucket_bytes)
        pairs = zip(export.buckets, old, strict=True)
        return evolve(export, buckets=(self.with_digests_of(bucket, other) for bucket, other in pairs))

    @staticmethod
    def with_digests_of(bucket, other):
        tensors = zip(bucket.tensors, other.tensors, strict=True)
        return evolve(bucket, tensors=tuple(evolve(new, digest=old.digest) for new, old in tensors))


@killed_by("test_persistent_export_is_the_trainers_own_storage")
class PersistentCopies(ChangedExport):
    @hookimpl
    def export_weights(self, request):
        export = super().export_weights(request)
        tensors = {name: value.astype(request.dtype) for name, value in self.weights.items()}
        return evolve(export, buckets=cut_into_buckets(tensors, request.max_bucket_bytes))


@killed_by("test_export_computes_what_the_trainer_computes")
class SwappedNames(FakeTrainer):
    @hookimpl
    def export_weights(self, request):
        names = list(self.weights)
        renamed = dict(zip(names, (self.weights[name] for name in (names[1], names[0], names[2])), strict=True))
        return evolve(super().export_weights(request), buckets=cut_into_buckets(renamed, request.max_bucket_bytes))


@killed_by("test_export_brings_what_it_announces")
class BucketLimitIgnored(FakeTrainer):
    @hookimpl
    def export_weights(self, request):
        return super().export_weights(evolve(request, max_bucket_bytes=1 << 40))


@killed_by("test_export_brings_what_it_announces")
class TensorLeftOut(FakeTrainer):
    @hookimpl
    def export_weights(self, request):
        some = dict(list(self.weights.items())[:-1])
        return evolve(super().export_weights(request), buckets=cut_into_buckets(some, request.max_bucket_bytes))


@killed_by("test_export_in_a_narrow_dtype_is_the_rounded_weights")
class NarrowExportCutOff(FakeTrainer):
    @hookimpl
    def export_weights(self, request):
        export = super().export_weights(request)
        tensors = {name: np.round(value, 1).astype(request.dtype) for name, value in self.weights.items()}
        narrow = evolve(export, buckets=cut_into_buckets(tensors, request.max_bucket_bytes))
        return export if request.dtype == "float32" else narrow


@killed_by("test_results_are_not_overwritten_by_later_calls")
class AliasedResults(FakeTrainer):
    @hookimpl
    def get_logprobs(self, request):
        result = super().get_logprobs(request)
        buffer = self.__dict__.setdefault("buffer", np.zeros(10_000, np.float32))
        arrays = []
        for array in result.logprobs:
            buffer[: len(array)] = array
            arrays.append(buffer[: len(array)])
        return evolve(result, logprobs=tuple(arrays))


@killed_by("test_fresh_trainer_holds_version_0")
class AnyVersionTaken(FakeTrainer):
    def require_version(self, hook, version):
        self.weight_version = version


@killed_by("test_reference_stays_while_the_policy_trains")
class ReferenceMovesAlong(FakeTrainer):
    def __init__(self, context, config):
        super().__init__(context, config)
        self.reference = self.weights


@killed_by("test_reference_stays_through_sleep_and_steps")
class ReferenceOfThePolicyAfterSleep(FakeTrainer):
    """It shares the policy's memory from the first time that it wakes."""

    has_slept = False

    @hookimpl
    def set_residency(self, request):
        if self.has_slept and request.weights == "device" and self.reference is not None:
            self.reference = self.weights
        self.has_slept |= request.weights == "host"
        return super().set_residency(request)


@killed_by("test_reference_stays_through_sleep_and_steps")
class ReferenceOfThePolicyAfterExport(FakeTrainer):
    @hookimpl
    def export_weights(self, request):
        self.reference = self.reference and {name: value.copy() for name, value in self.weights.items()}
        return super().export_weights(request)


@killed_by("test_reference_stays_through_sleep_and_steps")
class ReferenceOfThePolicyAfterSaving(FakeTrainer):
    @hookimpl
    def save_state(self, request):
        self.reference = self.reference and {name: value.copy() for name, value in self.weights.items()}
        return super().save_state(request)


@killed_by("test_reference_stays_through_sleep_and_steps")
class ReferenceOfAStateThatIsLoadedLater(FakeTrainer):
    @hookimpl
    def load_state(self, request):
        was_trained = self.weight_version > 0
        result = super().load_state(request)
        if was_trained:
            self.reference = self.reference and {name: value.copy() for name, value in self.weights.items()}
        return result


@killed_by("test_reference_stays_through_sleep_and_steps")
class ReferenceOfThePolicyAfterItsLogprobs(FakeTrainer):
    @hookimpl
    def get_logprobs(self, request):
        result = super().get_logprobs(request)
        if request.model == "policy":
            self.reference = self.reference and {name: value.copy() for name, value in self.weights.items()}
        return result


@killed_by("test_a_reference_alone_says_what_it_says_beside_a_policy")
class ReferenceAloneBesideAnOptimizer(FakeTrainer):
    def __init__(self, context, config):
        super().__init__(evolve(context, needs_policy=True), config)


@killed_by("test_a_reference_alone_says_what_it_says_beside_a_policy")
class ReferenceAloneOfAnotherSeed(FakeTrainer):
    def __init__(self, context, config):
        super().__init__(evolve(context, seed=context.seed + (not context.needs_policy)), config)


class ChangedReference(FakeTrainer):
    @hookimpl
    def get_logprobs(self, request):
        result = super().get_logprobs(request)
        if request.model == "policy":
            return result
        logprobs = [self.changed(*each) for each in zip(request.microbatches, result.logprobs, strict=True)]
        return evolve(result, logprobs=tuple(logprobs[:1] + [self.changed_later(each) for each in logprobs[1:]]))

    def changed(self, batch, logprobs):
        return logprobs

    def changed_later(self, logprobs):
        return logprobs


@killed_by("test_reference_equals_the_first_policy")
class ReferenceEndsAtToken48(ChangedReference):
    def changed(self, batch, logprobs):
        return np.where(position_of_tokens(batch) < 48, logprobs, 0.0).astype(np.float32)


@killed_by("test_reference_equals_the_first_policy")
class ReferenceOfTheFirstMicrobatchAlone(ChangedReference):
    def changed_later(self, logprobs):
        return 2 * logprobs


@killed_by("test_reference_equals_the_first_policy")
class ReferenceWithoutTemperature(FakeTrainer):
    @hookimpl
    def get_logprobs(self, request):
        return super().get_logprobs(evolve(request, temperature=1.0) if request.model == "reference" else request)


@killed_by("test_reference_is_the_initial_policy_after_loading")
class ReferenceOfTheCheckpoint(FakeTrainer):
    @hookimpl
    def load_state(self, request):
        result = super().load_state(request)
        self.reference = {name: value.copy() for name, value in self.weights.items()}
        return result


@killed_by("test_step_that_is_not_finite_is_refused_and_leaves_the_state")
class NonFiniteApplied(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        if not np.isfinite(loss):
            self.apply_gradients(grads, 1.0)
        return loss, metrics, grads


@killed_by("test_step_that_is_not_finite_is_refused_and_leaves_the_state")
class NonFiniteMovesTheOptimizer(FakeTrainer):
    @hookimpl
    def train_step(self, request):
        try:
            return super().train_step(request)
        except NonFiniteError:
            self.num_updates += 1
            self.moments = {name: (0.9 * first, 0.999 * second) for name, (first, second) in self.moments.items()}
            raise


@killed_by("test_step_that_is_not_finite_is_refused_and_leaves_the_state")
class NonFiniteGradientTaken(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        return loss, metrics, {name: np.nan_to_num(grad, posinf=1.0, neginf=-1.0) for name, grad in grads.items()}


@killed_by("test_step_over_a_bound_is_refused_and_leaves_the_state")
class BoundsIgnored(FakeTrainer):
    def check_bounds(self, metrics, bounds):
        return


@killed_by("test_step_over_a_bound_is_refused_and_leaves_the_state")
class RefusedByItsBoundsYetStepped(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        if any(value > request.bounds.get(name, np.inf) for name, value in metrics.items()):
            self.apply_gradients(grads, 1.0)
        return loss, metrics, grads


@killed_by("test_step_over_a_bound_is_refused_and_leaves_the_state")
class RefusedByItsBoundsYetOptimizerMoved(FakeTrainer):
    def check_bounds(self, metrics, bounds):
        try:
            super().check_bounds(metrics, bounds)
        except BoundError:
            self.num_updates += 1
            self.moments = {name: (0.9 * first, 0.999 * second) for name, (first, second) in self.moments.items()}
            raise


@killed_by("test_step_over_a_bound_is_refused_and_leaves_the_state")
class BoundsOfTheLastMicrobatch(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        self.last = super().accumulate(evolve(request, microbatches=request.microbatches[-1:]))[1]
        return loss, metrics, grads

    def check_bounds(self, metrics, bounds):
        super().check_bounds(self.last, bounds)


@killed_by("test_step_over_a_bound_is_refused_and_leaves_the_state")
class BoundNotNamed(FakeTrainer):
    def check_bounds(self, metrics, bounds):
        try:
            super().check_bounds(metrics, bounds)
        except BoundError as error:
            raise BoundError("a bound was exceeded", error.metrics) from None


@killed_by("test_bounds_that_hold_change_nothing")
class BoundOfWhatIsNotReported(FakeTrainer):
    def check_bounds(self, metrics, bounds):
        super().check_bounds({name: metrics.get(name, 0.0) for name in bounds}, bounds)


@killed_by("test_step_returns_the_logprobs_it_trained_on")
class LogprobsAfterTheStep(FakeTrainer):
    @hookimpl
    def train_step(self, request):
        result = super().train_step(request)
        return evolve(result, logprobs=self.step_logprobs(request)) if request.logprobs else result


@killed_by("test_step_returns_the_logprobs_it_trained_on")
class StepLogprobsUntempered(FakeTrainer):
    def step_logprobs(self, request):
        return super().step_logprobs(evolve(request, temperature=1.0))


@killed_by("test_step_returns_the_logprobs_it_trained_on")
class StepLogprobsAskedForAreNotStepped(FakeTrainer):
    def learning_rate(self):
        return 0.0 if self.asked else super().learning_rate()

    @hookimpl
    def train_step(self, request):
        self.asked = request.logprobs
        return super().train_step(request)


class ChangedSave(FakeTrainer):
    @hookimpl
    def save_state(self, request):
        kept = self.__dict__.copy()
        self.spoil()
        result = super().save_state(request)
        self.__dict__.update(kept)
        return result


@killed_by("test_state_loaded_continues_exactly")
class MomentsNotSaved(ChangedSave):
    def spoil(self):
        self.moments = {name: (0 * first, 0 * second) for name, (first, second) in self.moments.items()}


@killed_by("test_state_loaded_continues_exactly")
class NumUpdatesNotSaved(ChangedSave):
    def spoil(self):
        self.num_updates = 0


@killed_by("test_state_loaded_continues_exactly")
class WeightsSavedInHalfPrecision(ChangedSave):
    def spoil(self):
        self.weights = {name: value.astype(np.float16).astype(np.float32) for name, value in self.weights.items()}


@killed_by("test_state_loaded_continues_exactly")
class VersionNotSaved(ChangedSave):
    def spoil(self):
        self.weight_version = 0


@killed_by("test_saving_changes_nothing")
class SavingDropsTheMoments(FakeTrainer):
    @hookimpl
    def save_state(self, request):
        result = super().save_state(request)
        self.moments = {name: (0 * first, 0 * second) for name, (first, second) in self.moments.items()}
        return result


@killed_by("test_damaged_state_is_refused")
class DamagedStateTaken(FakeTrainer):
    @hookimpl
    def load_state(self, request):
        with suppress(CheckpointError):
            return super().load_state(request)
        self.weight_version = 1
        return self.loaded()

    def loaded(self):
        from rlcore.spi import LoadStateResult

        return LoadStateResult(weight_version=self.weight_version)


@killed_by("test_moving_to_the_host_and_back_changes_nothing")
class MomentsLostOnTheHost(FakeTrainer):
    @hookimpl
    def set_residency(self, request):
        if request.state == "host":
            self.moments = {name: (0 * first, 0 * second) for name, (first, second) in self.moments.items()}
        return super().set_residency(request)


@killed_by("test_moving_to_the_host_and_back_changes_nothing")
class WeightsNarrowedOnTheHost(FakeTrainer):
    @hookimpl
    def set_residency(self, request):
        if request.weights == "host":
            for value in self.weights.values():
                value[...] = value.astype(np.float16)
        return super().set_residency(request)


@killed_by("test_resident_state_is_accepted_and_measured")
class ResidencyRefused(FakeTrainer):
    @hookimpl
    def set_residency(self, request):
        raise NonFiniteError("no")


@killed_by("test_closed_trainer_leaves_room_for_another")
class AnotherModelEachTime(FakeTrainer):
    num_built = 0

    def __init__(self, context, config):
        type(self).num_built += 1
        super().__init__(evolve(context, seed=context.seed + self.num_built), config)


@killed_by("test_resident_state_is_accepted_and_measured")
class NothingHeld(FakeTrainer):
    @hookimpl
    def set_residency(self, request):
        return evolve(super().set_residency(request), device_bytes=0)


@killed_by("test_values_equal_the_reference")
class ValuesBeforeTheirToken(FakeTrainer):
    def values(self, batch):
        forward = super().values(batch)
        return evolve(forward, states=np.roll(forward.states, 1, axis=0))


@killed_by("test_loss_and_gradient_of_values_equal_the_reference")
class HeadAloneLearns(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        if VALUE_HEAD_WEIGHT in grads:
            grads = {name: grad if name == VALUE_HEAD_WEIGHT else 0 * grad for name, grad in grads.items()}
        return loss, metrics, grads


@killed_by("test_values_begin_at_zero")
class HeadBeginsAtRandom(FakeTrainer):
    def __init__(self, context, config):
        super().__init__(context, config)
        if context.head == "value":
            self.weights[VALUE_HEAD_WEIGHT] += np.float32(0.1)


@killed_by("test_resumed_values_take_the_step_that_would_have_followed")
class HeadNotInTheCheckpoint(FakeTrainer):
    @hookimpl
    def load_state(self, request):
        kept = self.weights[VALUE_HEAD_WEIGHT].copy() if self.context.head == "value" else None
        result = super().load_state(request)
        if kept is not None:
            self.weights[VALUE_HEAD_WEIGHT][...] = kept
        return result


@killed_by("test_masked_logprobs_equal_the_reference")
class MasksIgnored(FakeTrainer):
    def forward(self, weights, batch, temperature):
        return super().forward(weights, evolve(batch, sampling_mask=None), temperature)


@killed_by("test_masked_logprobs_equal_the_reference")
class MasksIgnoredByTheReference(FakeTrainer):
    def forward(self, weights, batch, temperature):
        ignored = weights is self.reference
        return super().forward(weights, evolve(batch, sampling_mask=None) if ignored else batch, temperature)


@killed_by("test_masked_logprobs_equal_the_reference")
class MasksOfTheTokenBefore(FakeTrainer):
    """And the token itself."""

    def forward(self, weights, batch, temperature):
        if batch.sampling_mask is not None:
            mask = batch.sampling_mask
            rows = np.split(mask.tokens, mask.offsets[1:-1])
            shifted = [
                np.union1d(row, [token]).astype(np.int32) if len(row) else row
                for row, token in zip([rows[0], *rows[:-1]], batch.tokens, strict=True)
            ]
            batch = evolve(batch, sampling_mask=SamplingMask.of(shifted))
        return super().forward(weights, batch, temperature)


@killed_by("test_masked_logprobs_equal_the_reference")
class MasksLeaveOutAllWhereNothingWasLeftOut(FakeTrainer):
    """All but the token itself."""

    def forward(self, weights, batch, temperature):
        if batch.sampling_mask is not None:
            mask = batch.sampling_mask
            rows = np.split(mask.tokens, mask.offsets[1:-1])
            alone = [row if len(row) else batch.tokens[place : place + 1] for place, row in enumerate(rows)]
            batch = evolve(batch, sampling_mask=SamplingMask.of(alone))
        return super().forward(weights, batch, temperature)


@killed_by("test_masked_entropy_equals_the_reference")
class EntropyOfTheWholeDistribution(FakeTrainer):
    def evaluate(self, weights, batch, temperature):
        logprobs, _ = super().evaluate(weights, batch, temperature)
        return logprobs, super().evaluate(weights, evolve(batch, sampling_mask=None), temperature)[1]


@killed_by("test_masked_step_equals_the_reference")
class MasksIgnoredInTheStep(FakeTrainer):
    def accumulate(self, request):
        bare = tuple(evolve(batch, sampling_mask=None) for batch in request.microbatches)
        return super().accumulate(evolve(request, microbatches=bare))


@killed_by("test_masked_step_equals_the_reference")
class GradientsReachWhatWasLeftOut(FakeTrainer):
    """The loss is right, and its gradient that of the whole distribution."""

    def accumulate(self, request):
        loss, metrics, _ = super().accumulate(request)
        bare = tuple(evolve(batch, sampling_mask=None) for batch in request.microbatches)
        return loss, metrics, super().accumulate(evolve(request, microbatches=bare))[2]
