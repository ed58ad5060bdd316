"""Trainers whose pieces do not add up to a step, made from the fake; each names the check that has to fail."""

from types import MappingProxyType

import numpy as np
from attrs import evolve
from mutants import killed_by
from ranked_trainer import RankedFakeTrainer

from rlcore.spi import hookimpl
from rlcore.testing.fakes.trainer import FakeTrainer

SETTINGS = ("learning_rate", "betas", "eps", "weight_decay", "max_grad_norm")


@killed_by("test_pieces_equal_one_step")
class LastPieceAlone(FakeTrainer):
    @hookimpl
    def forward_backward(self, request):
        return super().forward_backward(evolve(request, piece=0))


@killed_by("test_pieces_equal_one_step")
class GradientsKeptAfterTheStep(FakeTrainer):
    """Adds the gradients of all steps."""

    @hookimpl
    def forward_backward(self, request):
        return super().forward_backward(evolve(request, piece=1))

    @hookimpl
    def optim_step(self, request):
        kept = self.gradients
        result = super().optim_step(request)
        self.gradients = kept
        return result


@killed_by("test_gradients_of_an_abandoned_step_are_dropped")
class AbandonedStepAdded(FakeTrainer):
    @hookimpl
    def forward_backward(self, request):
        return super().forward_backward(evolve(request, piece=1))


@killed_by("test_gradients_of_an_abandoned_step_are_dropped")
class AbandonedStepInTheNextWholeOne(FakeTrainer):
    left = MappingProxyType({})

    @hookimpl
    def train_step(self, request):
        self.left, self.gradients = self.gradients, {}
        return super().train_step(request)

    def reduced(self, loss, sums, maxima, grads):
        loss, metrics, grads = super().reduced(loss, sums, maxima, grads)
        return loss, metrics, {name: grad + self.left.get(name, 0.0) for name, grad in grads.items()}


@killed_by("test_load_without_the_optimizer_begins_it_anew")
class OptimizerLoadedUnasked(FakeTrainer):
    @hookimpl
    def load_state(self, request):
        return super().load_state(evolve(request, optimizer=True))


@killed_by("test_failed_piece_drops_all")
class InfiniteLossTaken(FakeTrainer):
    def accumulate(self, request):
        loss, metrics, grads = super().accumulate(request)
        return np.nan_to_num(loss), {name: np.nan_to_num(value) for name, value in metrics.items()}, grads


@killed_by("test_gradient_that_is_not_finite_leaves_the_weights")
class GradientsMadeFinite(FakeTrainer):
    @hookimpl
    def optim_step(self, request):
        self.gradients = {name: np.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0) for name, grad in self.gradients.items()}
        return super().optim_step(request)


@killed_by("test_calls_between_pieces_leave_the_gradients")
class CheckpointDropsGradients(FakeTrainer):
    @hookimpl
    def save_state(self, request):
        self.gradients = {}
        return super().save_state(request)


@killed_by("test_piece_returns_figures_of_its_tokens")
class LogprobsAtAnotherTemperature(FakeTrainer):
    @hookimpl
    def forward_backward(self, request):
        result = super().forward_backward(request)
        if not request.logprobs:
            return result
        return evolve(result, logprobs=self.step_logprobs(evolve(request, temperature=2.0 * request.temperature)))


@killed_by("test_schedule_sets_the_rate_of_a_step_that_names_none")
class PeakRateWhereNoneIsNamed(FakeTrainer):
    @hookimpl
    def optim_step(self, request):
        rate = self.context.optimizer.learning_rate if request.learning_rate is None else request.learning_rate
        return super().optim_step(evolve(request, learning_rate=rate))


class SettingIgnored(FakeTrainer):
    @hookimpl
    def optim_step(self, request):
        return super().optim_step(evolve(request, **{self.setting: None}))


for setting in SETTINGS:
    name = f"{setting.title().replace('_', '')}OfTheStepIgnored"
    killed_by("test_settings_are_those_of_the_step")(
        type(name, (SettingIgnored,), {"setting": setting, "__module__": __name__})
    )


@killed_by("test_settings_are_those_of_the_step")
class SettingsStay(FakeTrainer):
    """The step behind those with settings of their own has them too."""

    kept = None

    def learning_rate(self):
        if self.given is not None and self.given.learning_rate is not None:
            self.kept = self.given.learning_rate
        return self.kept or super().learning_rate()


@killed_by("test_two_ranks_are_one_trainer")
class PiecesOfOneRankAlone(RankedFakeTrainer):
    """The gradients of the other rank's pieces are lost."""

    in_piece = False

    @hookimpl
    def forward_backward(self, request):
        self.in_piece = True
        try:
            return super().forward_backward(request)
        finally:
            self.in_piece = False

    def reduced(self, loss, sums, maxima, grads):
        own = {name: grad.copy() for name, grad in grads.items()}
        loss, metrics, grads = super().reduced(loss, sums, maxima, grads)
        return loss, metrics, own if self.in_piece else grads
