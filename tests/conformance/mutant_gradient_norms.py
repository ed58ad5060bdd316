"""Trainers whose norms of gradients are wrong, made from the fake; each names the check that has to fail."""

from attrs import evolve
from mutants import killed_by
from ranked_trainer import RankedFakeTrainer

from rlcore.spi import hookimpl
from rlcore.testing.fakes.policy import ORIGIN, TRANSITION
from rlcore.testing.fakes.trainer import FakeTrainer

NORMS = "test_norms_are_those_of_the_tensors_gradients"


class WrongNorms(FakeTrainer):
    """A trainer that changes right norms."""

    def gradient_norms(self, request, grads):
        norms = super().gradient_norms(request, grads)
        return None if norms is None else self.changed(norms)


@killed_by(NORMS)
class NormsAfterClipping(WrongNorms):
    def changed(self, norms):
        norm = sum(one**2 for one in norms.values()) ** 0.5
        share = min(1.0, self.context.optimizer.max_grad_norm / norm)
        return {name: share * one for name, one in norms.items()}


@killed_by(NORMS)
class DuplicateCountedTwice(WrongNorms):
    """Counts a tensor twice, as two ranks that both add it do."""

    def changed(self, norms):
        return {**norms, TRANSITION: 2**0.5 * norms[TRANSITION]}


@killed_by(NORMS)
class TiedTensorUnderBothNames(WrongNorms):
    def changed(self, norms):
        return {**norms, "head.weight": norms[TRANSITION]}


@killed_by(NORMS)
class NamesOfTheTrainersOwn(WrongNorms):
    def changed(self, norms):
        return {f"module.{name}": one for name, one in norms.items()}


@killed_by(NORMS)
class NamesMixedUp(WrongNorms):
    def changed(self, norms):
        return {**norms, TRANSITION: norms[ORIGIN], ORIGIN: norms[TRANSITION]}


@killed_by(NORMS)
class NormsOfAllTensorsTogether(WrongNorms):
    """The sum of squares is right, and nothing else."""

    def changed(self, norms):
        whole = sum(one**2 for one in norms.values()) ** 0.5
        return {**dict.fromkeys(norms, 0.0), TRANSITION: whole}


@killed_by(NORMS)
class OneTensorLeftOut(WrongNorms):
    def changed(self, norms):
        return {name: one for name, one in norms.items() if name != ORIGIN}


@killed_by(NORMS)
class NormsOfTheLastMicrobatch(FakeTrainer):
    def accumulate(self, request):
        self.last = super().accumulate(evolve(request, microbatches=request.microbatches[-1:]))[2]
        return super().accumulate(request)

    def gradient_norms(self, request, grads):
        return super().gradient_norms(request, self.last)


@killed_by("test_step_with_norms_is_the_step_without")
class NormsAskedForAreNotStepped(FakeTrainer):
    def apply_gradients(self, grads, norm):
        if not self.asked:
            super().apply_gradients(grads, norm)

    @hookimpl
    def train_step(self, request):
        self.asked = request.gradient_norms
        return super().train_step(request)


@killed_by("test_norms_of_pieces_are_those_of_the_step")
class NormsOfTheLastPiece(FakeTrainer):
    def accumulate(self, request):
        result = super().accumulate(request)
        self.last = result[2]
        return result

    def gradient_norms(self, request, grads):
        return super().gradient_norms(request, self.last)


class NormsOfTheRank(RankedFakeTrainer):
    """Gradients before they are added up over the ranks."""

    def reduced(self, loss, sums, maxima, grads):
        self.own = {name: grad.copy() for name, grad in grads.items()}
        return super().reduced(loss, sums, maxima, grads)


@killed_by("test_two_ranks_are_one_trainer")
class NormsOfOwnGradients(NormsOfTheRank):
    def gradient_norms(self, request, grads):
        return super().gradient_norms(request, self.own)


@killed_by("test_two_ranks_are_one_trainer")
class NormsOfOwnShard(RankedFakeTrainer):
    """Each rank's part of the rows of the right gradients."""

    def gradient_norms(self, request, grads):
        rank, size = self.rank_info.rank, self.rank_info.world_size
        return super().gradient_norms(request, {name: grad[rank::size] for name, grad in grads.items()})


@killed_by("test_two_ranks_are_one_trainer_of_values")
class NormsOfOwnGradientsOfValues(NormsOfTheRank):
    def gradient_norms(self, request, grads):
        return super().gradient_norms(request, self.own)


@killed_by("test_norms_of_gradients_have_the_head_among_them")
class NormsWithoutTheHead(WrongNorms):
    def changed(self, norms):
        return {name: one for name, one in norms.items() if name != "score.weight"}
