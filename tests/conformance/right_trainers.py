"""Trainers that are right though unlike the fake; each names the check that has to pass."""

from attrs import evolve
from ranked_trainer import RankedFakeTrainer

from rlcore.spi import TensorSpec, hookimpl
from rlcore.testing.fakes.policy import TRANSITION
from rlcore.testing.fakes.trainer import FakeTrainer, cut_into_buckets


class FiguresRoundedOnRankOne(RankedFakeTrainer):
    """By less than a run notices."""

    check = "test_two_ranks_are_one_trainer"

    def reduced(self, loss, sums, maxima, grads):
        loss, metrics, grads = super().reduced(loss, sums, maxima, grads)
        scale = 1.0 + 1e-9 * self.rank_info.rank
        return scale * loss, {name: scale * value for name, value in metrics.items()}, grads


class ExportsOneTensorTwice(FakeTrainer):
    """As a head that is tied to the embedding, and holds it once; its moments come with the first update."""

    check = "test_resident_state_is_accepted_and_measured"

    @hookimpl
    def export_weights(self, request):
        export = super().export_weights(request)
        tensors = {name: value.astype(request.dtype) for name, value in self.weights.items()}
        tensors["head.weight"] = tensors[TRANSITION]
        specs = tuple(TensorSpec(name=name, shape=value.shape, dtype=request.dtype) for name, value in tensors.items())
        buckets = cut_into_buckets(tensors, request.max_bucket_bytes)
        return evolve(export, specs=specs, buckets=buckets, persistent=False)

    @hookimpl
    def set_residency(self, request):
        return evolve(super().set_residency(request), device_bytes=sum(value.nbytes for value in self.weights.values()))
