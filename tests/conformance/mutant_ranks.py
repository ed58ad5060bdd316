"""Trainers that are wrong on several ranks alone, made from the fake for them; each names the check that has to fail."""

import torch.distributed as dist
from attrs import evolve
from mutants import killed_by
from ranked_trainer import RankedFakeTrainer

RANKS = "test_two_ranks_are_one_trainer"


@killed_by(RANKS)
class GradientsAveraged(RankedFakeTrainer):
    """Though losses are divided by global counts already."""

    def reduced(self, loss, sums, maxima, grads):
        loss, metrics, grads = super().reduced(loss, sums, maxima, grads)
        return loss, metrics, {name: grad / self.rank_info.world_size for name, grad in grads.items()}


@killed_by(RANKS)
class GradientsOfTheRank(RankedFakeTrainer):
    def added(self, array):
        return array


@killed_by(RANKS)
class CountsOfTheRank(RankedFakeTrainer):
    def accumulate(self, request):
        if self.rank_info.world_size == 1:
            return super().accumulate(request)
        found = [batch.counts() for batch in request.microbatches]
        counts = evolve(
            request.counts,
            num_loss_tokens=max(sum(part.num_loss_tokens for part in found), 1),
            num_loss_sequences=max(sum(part.num_loss_sequences for part in found), 1),
        )
        return super().accumulate(evolve(request, counts=counts))


@killed_by(RANKS)
class MetricsOfTheRank(RankedFakeTrainer):
    """The loss is that of all."""

    def reduced(self, loss, sums, maxima, grads):
        loss, _, grads = super().reduced(loss, sums, maxima, grads)
        return loss, sums | maxima, grads


@killed_by(RANKS)
class MaximaOfTheRank(RankedFakeTrainer):
    def over_ranks(self, figures, how):
        return figures if how == "max" else super().over_ranks(figures, how)


@killed_by(RANKS)
class MaximaAddedUp(RankedFakeTrainer):
    def over_ranks(self, figures, how):
        return super().over_ranks(figures, "sum")


@killed_by(RANKS)
class SecondRankForgotten(RankedFakeTrainer):
    """All take over what rank 0 found."""

    def added(self, array):
        import torch

        values = torch.from_numpy(array.copy())
        if self.rank_info.world_size > 1:
            dist.broadcast(values, 0)
        return values.numpy()


@killed_by(RANKS)
class BoundsOfTheRank(RankedFakeTrainer):
    def reduced(self, loss, sums, maxima, grads):
        self.own = sums | maxima
        return super().reduced(loss, sums, maxima, grads)

    def check_bounds(self, metrics, bounds):
        super().check_bounds(self.own, bounds)


@killed_by(RANKS)
class OtherWeightsOnRankOne(RankedFakeTrainer):
    def apply_gradients(self, grads, norm):
        super().apply_gradients(grads, norm)
        for value in self.weights.values():
            value *= 1.0 + 1e-6 * self.rank_info.rank


@killed_by(RANKS)
class PreviousLogprobsDroppedOnRankOne(RankedFakeTrainer):
    def call_loss(self, request, batch, forward):
        if self.rank_info.rank:
            request = evolve(request, loss=evolve(request.loss, previous_logprobs="unchanged"))
        return super().call_loss(request, batch, forward)


@killed_by(RANKS)
class ScheduleStepIgnoredOnRanks(RankedFakeTrainer):
    def learning_rate(self):
        step = self.schedule_step if self.rank_info.world_size == 1 else self.weight_version
        return self.context.learning_rate(step)
