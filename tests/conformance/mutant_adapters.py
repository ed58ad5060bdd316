"""Generators of several adapters that are each wrong in one known way, made from the fake."""

import numpy as np
from attrs import evolve
from mutants import killed_by

from rlcore.spi import hookimpl
from rlcore.testing.fakes.generator import FakeGenerator

ALONE = "test_each_adapter_samples_as_it_does_alone"
MIXED = "test_one_batch_has_samples_of_several_adapters"
OTHERS = "test_refit_of_one_adapter_leaves_others"
DROPPED = "test_dropped_adapters_make_room"
BELOW = "test_weights_below_forget_other_adapters"
UNDER_WAY = "test_adapters_change_while_others_sample"


class OtherAdapter(FakeGenerator):
    """Samples by another adapter than the one that a request names, and says the version of that one."""

    def sampled(self, request):
        found = super().sampled(request)
        return None if found is None else (self.adapted.get(self.other(request.adapter), found[0]), found[1])


@killed_by(ALONE)
class SamplesByTheLastAdapter(OtherAdapter):
    def other(self, name):
        return list(self.adapted)[-1] if self.adapted else name


@killed_by(ALONE)
class SamplesByTheFirstAdapter(OtherAdapter):
    def other(self, name):
        return next(iter(self.adapted), name)


@killed_by(ALONE)
class SamplesWithoutAdapters(FakeGenerator):
    def sampled(self, request):
        found = super().sampled(request)
        return None if found is None else (self.weights, found[1])


@killed_by(ALONE)
class VersionOfTheLastRefit(FakeGenerator):
    """Samples carry it, whatever adapter they are of."""

    @hookimpl
    def refit(self, request):
        self.last = request.weight_version
        return super().refit(request)

    def sampled(self, request):
        found = super().sampled(request)
        return None if found is None else (found[0], self.last)


@killed_by(MIXED)
class BatchByItsFirstAdapter(OtherAdapter):
    """All requests of a stream are sampled by the adapter of the first."""

    first = None

    @hookimpl
    def stream(self, request):
        try:
            return super().stream(request)
        finally:
            self.first = None

    def begin(self, request):
        self.first = request.adapter if self.first is None else self.first
        return super().begin(request)

    def other(self, name):
        return name if self.first is None else self.first


@killed_by(MIXED)
class PrefixesCachedOverAdapters(FakeGenerator):
    """The first token after prompts is drawn by whichever adapter has read them first in the stream."""

    @hookimpl
    def stream(self, request):
        self.cached = {}
        return super().stream(request)

    def step(self, samples):
        self.prompts = None if samples.num_steps else samples.request.prompts.tokens.tobytes()
        return super().step(samples)

    def sampled(self, request):
        found = super().sampled(request)
        return found if self.prompts is None else (self.cached.setdefault(self.prompts, found[0]), found[1])


@killed_by(OTHERS)
class RefitFillsEveryAdapter(FakeGenerator):
    def take_adapter(self, adapter, lora, request):
        super().take_adapter(adapter, lora, request)
        if not request.weights.has_weights and request.weight_version == 7:
            self.adapted = dict.fromkeys(self.adapted, self.adapted[request.adapter])


@killed_by(OTHERS)
class RefitOfAnAdapterIsLost(FakeGenerator):
    """It acknowledges the new values, and keeps the first ones of each name."""

    def take_adapter(self, adapter, lora, request):
        kept = self.adapted.get(request.adapter)
        super().take_adapter(adapter, lora, request)
        self.adapted[request.adapter] = kept or self.adapted[request.adapter]


@killed_by(OTHERS)
class AdaptersAddUp(FakeGenerator):
    """A refit adds the new product to the weights that have the old one already."""

    def take_adapter(self, adapter, lora, request):
        kept, below = self.adapted.get(request.adapter), self.weights
        self.weights = kept or below
        super().take_adapter(adapter, lora, request)
        self.weights = below


@killed_by(OTHERS)
class LogprobsCachedOverRefits(FakeGenerator):
    """Values of a request that it has seen are not computed again."""

    @hookimpl
    def generate(self, request):
        kept = self.__dict__.setdefault("kept", {})
        key = request.adapter, request.prompts.tokens.tobytes(), request.seeds.tobytes()
        result = super().generate(request)
        first = kept.setdefault(key, result)
        return evolve(first, weight_versions=np.full_like(first.weight_versions, request.weight_version))


@killed_by(DROPPED)
class PlaceOfADroppedAdapterKeepsItsValues(FakeGenerator):
    def take_adapter(self, adapter, lora, request):
        kept = [self.adapted[name] for name in request.drops]
        super().take_adapter(adapter, lora, request)
        if kept:
            self.adapted[request.adapter] = kept[0]


@killed_by(DROPPED)
class DropsTheOldestToo(FakeGenerator):
    """It goes on by the weights below, under the name and the version of the adapter."""

    def take_adapter(self, adapter, lora, request):
        super().take_adapter(adapter, lora, request)
        if request.drops:
            del self.adapted[next(iter(self.adapted))]


@killed_by(BELOW)
class AdaptersStayOnTheFirstWeights(FakeGenerator):
    """Adapters that came alone are added to the weights of the first refit."""

    def take_adapter(self, adapter, lora, request):
        first = self.__dict__.setdefault("first", dict(self.weights))
        below, self.weights = self.weights, first
        super().take_adapter(adapter, lora, request)
        self.weights = below


@killed_by(UNDER_WAY)
class DroppedAdapterGoesOn(FakeGenerator):
    """Its samples end by themselves, by the adapter that came in its place."""

    def sampled(self, request):
        found = super().sampled(request)
        return found or (self.adapted[list(self.adapted)[-1]], request.weight_version)


@killed_by(UNDER_WAY)
class StreamKeepsItsFirstAdapters(FakeGenerator):
    """Says the new version all the same."""

    begun = None

    @hookimpl
    def stream(self, request):
        self.begun = dict(self.adapted)
        try:
            return super().stream(request)
        finally:
            self.begun = None

    def sampled(self, request):
        found = super().sampled(request)
        return found if found is None or self.begun is None else (self.begun[request.adapter], found[1])
