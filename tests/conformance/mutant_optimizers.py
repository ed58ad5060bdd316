"""Trainers that optimize otherwise than their context says, made from the fake; each names the check that has to fail."""

from types import MappingProxyType

import numpy as np
from attrs import evolve
from mutants import killed_by

from rlcore.spi import ScheduleSpec, hookimpl
from rlcore.testing.fakes.policy import POSITION
from rlcore.testing.fakes.trainer import FakeTrainer, cut_into_buckets


class ChangedContext(FakeTrainer):
    def __init__(self, context, config):
        super().__init__(self.changed(context), config)


class ChangedOptimizer(ChangedContext):
    def changed(self, context):
        return evolve(context, optimizer=evolve(context.optimizer, **self.optimizer))


class ChangedSchedule(ChangedContext):
    def changed(self, context):
        return evolve(context, schedule=evolve(context.schedule, **self.schedule))


@killed_by("test_learning_rate_follows_the_schedule")
class LearningRateOfItsOwn(ChangedOptimizer):
    optimizer = MappingProxyType({"learning_rate": 0.02})


@killed_by("test_learning_rate_follows_the_schedule")
class WarmUpIgnored(ChangedSchedule):
    schedule = MappingProxyType({"warmup_steps": 0})


@killed_by("test_learning_rate_follows_the_schedule")
class DecayIgnored(ChangedSchedule):
    schedule = MappingProxyType({"decay": "constant"})


@killed_by("test_learning_rate_follows_the_schedule")
class CosineTakenForLinear(ChangedContext):
    def changed(self, context):
        schedule = context.schedule
        return evolve(context, schedule=evolve(schedule, decay="linear") if schedule.decay == "cosine" else schedule)


@killed_by("test_learning_rate_follows_the_schedule")
class DecayEndsAtZero(ChangedSchedule):
    schedule = MappingProxyType({"min_learning_rate_ratio": 0.0})


@killed_by("test_learning_rate_follows_the_schedule")
class DecayOverAnotherRun(ChangedContext):
    def changed(self, context):
        return evolve(context, num_train_steps=context.num_train_steps + 1)


@killed_by("test_learning_rate_follows_the_schedule")
class WarmUpFromZero(FakeTrainer):
    def learning_rate(self):
        step = self.weight_version
        return super().learning_rate() * (step / (step + 1) if step < self.context.schedule.warmup_steps else 1.0)


class OtherContextInUpdates(FakeTrainer):
    """What is reported is right."""

    def apply_gradients(self, grads, norm):
        kept, self.context = self.context, self.changed(self.context)
        super().apply_gradients(grads, norm)
        self.context = kept


@killed_by("test_weights_move_by_the_scheduled_rate")
class ScheduleReportedAlone(OtherContextInUpdates):
    def changed(self, context):
        return evolve(context, schedule=ScheduleSpec())


@killed_by("test_first_step_is_as_long_as_the_learning_rate")
class LearningRateReportedAlone(OtherContextInUpdates):
    def changed(self, context):
        return evolve(context, optimizer=evolve(context.optimizer, learning_rate=1.1 * context.optimizer.learning_rate))


@killed_by("test_schedule_continues_after_loading")
class ScheduleAnewAfterLoading(FakeTrainer):
    loaded_version = 0

    @hookimpl
    def load_state(self, request):
        result = super().load_state(request)
        self.loaded_version = result.weight_version
        return result

    def learning_rate(self):
        return self.context.learning_rate(self.weight_version - self.loaded_version)


@killed_by("test_first_step_is_as_long_as_the_learning_rate")
class GradientDescent(FakeTrainer):
    def apply_gradients(self, grads, norm):
        for name, grad in grads.items():
            self.weights[name] -= (self.learning_rate() * grad).astype(np.float32)


@killed_by("test_first_step_is_as_long_as_the_learning_rate")
class MomentsNotCorrected(FakeTrainer):
    def __init__(self, context, config):
        super().__init__(context, config)
        self.num_updates = 1_000_000


@killed_by("test_moments_decay_by_the_betas")
class BetasIgnored(ChangedOptimizer):
    optimizer = MappingProxyType({"betas": (0.9, 0.999)})


@killed_by("test_moments_decay_by_the_betas")
class BetasSwapped(ChangedContext):
    def changed(self, context):
        return evolve(context, optimizer=evolve(context.optimizer, betas=context.optimizer.betas[::-1]))


@killed_by("test_moments_decay_by_the_betas")
class SignsOfGradients(FakeTrainer):
    """As AdamW's first step, forever."""

    def apply_gradients(self, grads, norm):
        self.num_updates = 0
        self.moments = {name: (0 * first, 0 * second) for name, (first, second) in self.moments.items()}
        super().apply_gradients(grads, norm)


@killed_by("test_weight_decay_is_of_matrices_and_apart_from_the_gradient")
class NothingDecays(ChangedOptimizer):
    optimizer = MappingProxyType({"weight_decay": 0.0})


@killed_by("test_weight_decay_is_of_matrices_and_apart_from_the_gradient")
class DecayWithoutTheRate(ChangedContext):
    """The decay itself is taken off, whatever the learning rate."""

    def changed(self, context):
        spec = context.optimizer
        return evolve(context, optimizer=evolve(spec, weight_decay=spec.weight_decay / spec.learning_rate))


@killed_by("test_weight_decay_is_of_matrices_and_apart_from_the_gradient")
class DecayInTheGradient(ChangedOptimizer):
    """Adam with an L2 penalty."""

    optimizer = MappingProxyType({"weight_decay": 0.0})

    def __init__(self, context, config):
        super().__init__(context, config)
        self.decay = context.optimizer.weight_decay

    def apply_gradients(self, grads, norm):
        super().apply_gradients({name: grad + self.decay * self.weights[name] for name, grad in grads.items()}, norm)


@killed_by("test_weight_decay_is_of_matrices_and_apart_from_the_gradient")
class VectorsDecay(FakeTrainer):
    """One of the tables, all of which decay, is a vector to others."""

    @hookimpl
    def export_weights(self, request):
        export = super().export_weights(request)
        tensors = {name: value.astype(request.dtype) for name, value in self.weights.items()}
        tensors[POSITION] = tensors[POSITION].ravel()
        specs = tuple(evolve(spec, shape=tensors[spec.name].shape) for spec in export.specs)
        return evolve(export, specs=specs, buckets=cut_into_buckets(tensors, request.max_bucket_bytes), persistent=False)


@killed_by("test_gradients_are_scaled_down_to_the_global_norm")
class ClippingIgnored(ChangedOptimizer):
    optimizer = MappingProxyType({"max_grad_norm": 0.0})


@killed_by("test_gradients_are_scaled_down_to_the_global_norm")
class EpsIgnored(ChangedOptimizer):
    optimizer = MappingProxyType({"eps": 1e-8})


@killed_by("test_gradients_are_scaled_down_to_the_global_norm")
class ClippedToNothingAtZero(FakeTrainer):
    def apply_gradients(self, grads, norm):
        scale = float(self.context.optimizer.max_grad_norm > 0.0)
        super().apply_gradients({name: scale * grad for name, grad in grads.items()}, norm)


@killed_by("test_gradients_are_scaled_down_to_the_global_norm")
class EachTensorClipped(FakeTrainer):
    def apply_gradients(self, grads, norm):
        limit = self.context.optimizer.max_grad_norm or np.inf
        super().apply_gradients({name: grad * min(1.0, limit / np.linalg.norm(grad)) for name, grad in grads.items()}, 0.0)


@killed_by("test_gradients_are_scaled_down_to_the_global_norm")
class AlwaysOfTheNorm(FakeTrainer):
    """Short gradients are made longer."""

    def apply_gradients(self, grads, norm):
        scale = (self.context.optimizer.max_grad_norm or norm) / norm
        super().apply_gradients({name: scale * grad for name, grad in grads.items()}, 0.0)


@killed_by("test_gradients_are_scaled_down_to_the_global_norm")
class EachMicrobatchClipped(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, _ = super().accumulate(request)
        limit, total = self.context.optimizer.max_grad_norm or np.inf, {}
        for batch in request.microbatches:
            grads = super().accumulate(evolve(request, microbatches=(batch,)))[2]
            norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
            for name, grad in grads.items():
                total[name] = total.get(name, 0.0) + grad * min(1.0, limit / max(norm, 1e-30))
        return loss, metrics, total


@killed_by("test_gradients_are_scaled_down_to_the_global_norm")
class ClippedInOneMicrobatchAlone(FakeTrainer):
    def accumulate(self, request):
        self.num_microbatches = len(request.microbatches)
        return super().accumulate(request)

    def apply_gradients(self, grads, norm):
        super().apply_gradients(grads, norm if self.num_microbatches == 1 else 0.0)


@killed_by("test_weight_decay_is_of_matrices_and_apart_from_the_gradient")
class DecayAtThePeakRate(OtherContextInUpdates):
    """The gradient's part is at the scheduled one."""

    def changed(self, context):
        spec = context.optimizer
        decay = spec.weight_decay * spec.learning_rate / self.learning_rate()
        return evolve(context, optimizer=evolve(spec, weight_decay=decay))


def in_bfloat16(values):
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


class MomentsRounded(FakeTrainer):
    def apply_gradients(self, grads, norm):
        super().apply_gradients(grads, norm)
        self.moments = {name: self.rounded(*moments) for name, moments in self.moments.items()}


@killed_by("test_moments_are_kept_in_float32")
class FirstMomentInBfloat16(MomentsRounded):
    def rounded(self, first, second):
        return in_bfloat16(first), second


@killed_by("test_moments_are_kept_in_float32")
class SecondMomentInBfloat16(MomentsRounded):
    def rounded(self, first, second):
        return first, in_bfloat16(second)


@killed_by("test_gradients_keep_their_precision_however_small")
class GradientsThroughFloat16(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        return loss, metrics, {name: grad.astype(np.float16).astype(np.float64) for name, grad in grads.items()}


@killed_by("test_gradients_keep_their_precision_however_small")
class OneGradientThroughFloat16(FakeTrainer):
    """The others keep their precision."""

    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        return loss, metrics, {**grads, POSITION: grads[POSITION].astype(np.float16).astype(np.float64)}


@killed_by("test_schedule_continues_after_loading")
class ScheduleStepIgnoredAfterLoading(FakeTrainer):
    has_loaded = False

    @hookimpl
    def load_state(self, request):
        self.has_loaded = True
        return super().load_state(request)

    def learning_rate(self):
        return self.context.learning_rate(self.weight_version if self.has_loaded else self.schedule_step)


@killed_by("test_learning_rate_is_read_at_the_schedules_step")
class ScheduleStepIgnored(FakeTrainer):
    def learning_rate(self):
        return self.context.learning_rate(self.weight_version)


@killed_by("test_learning_rate_is_read_at_the_schedules_step")
class ScheduleStepReportedAlone(FakeTrainer):
    def apply_gradients(self, grads, norm):
        kept, self.schedule_step = self.schedule_step, self.weight_version
        super().apply_gradients(grads, norm)
        self.schedule_step = kept
