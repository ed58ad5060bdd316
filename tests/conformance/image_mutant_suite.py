"""Trainers of models of images that are each wrong in one known way; run by test_mutant_suites."""

import pytest
from attrs import evolve

from rlcore.spi import hookimpl
from rlcore_conformance import TrainerConformance
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.provider import PROVIDER
from rlcore_torchkit.refit.digest import make_buckets

LOGPROBS = "test_logprobs_after_images_equal_the_reference"
NEIGHBOURS = "test_another_image_changes_its_own_sequence_alone"
STEPS = "test_step_with_images_equals_the_reference"
PARTS = "test_every_part_of_the_model_trains"


def with_images(request, change):
    """The request with other images; of a microbatch without any, as it is."""
    batches = [batch if batch.images is None else evolve(batch, images=change(batch.images)) for batch in request.microbatches]
    return evolve(request, microbatches=tuple(batches))


class WrongTrainer(Fsdp2Backend):
    check: str
    """The kit's check that has to fail."""


class ReadsNoImage(WrongTrainer):
    check = LOGPROBS

    @hookimpl
    def get_logprobs(self, request):
        return super().get_logprobs(with_images(request, lambda images: ((),) * len(images)))


class KeepsTheFirstImageOfEachSize(WrongTrainer):
    check = NEIGHBOURS
    kept = None

    @hookimpl
    def get_logprobs(self, request):
        if self.kept is None:
            self.kept = request.microbatches[0].images
        return super().get_logprobs(with_images(request, lambda _: self.kept))


class TrainsOnWordsAlone(WrongTrainer):
    check = STEPS

    @hookimpl
    def train_step(self, request):
        return super().train_step(with_images(request, lambda images: ((),) * len(images)))


class LeavesTheTowerOutOfTheNorm(WrongTrainer):
    check = STEPS

    @hookimpl
    def train_step(self, request):
        for name, parameter in self.policy.named_parameters():
            parameter.requires_grad_("visual" not in name)
        return super().train_step(request)


class ExportsTheFirstTower(WrongTrainer):
    check = PARTS
    first = None

    @hookimpl
    def export_weights(self, request):
        export = super().export_weights(request)
        found = {named.name: named.tensor.clone() for bucket in export.buckets for named in bucket.tensors}
        self.first = self.first or found
        mixed = {name: self.first[name] if "visual" in name else tensor for name, tensor in found.items()}
        return evolve(export, buckets=make_buckets(mixed.items(), request.max_bucket_bytes))


class AddsFeaturesTwice(WrongTrainer):
    check = LOGPROBS

    @hookimpl
    def get_logprobs(self, request):
        language_model = self.policy.model.language_model
        add = language_model._deepstack_process
        language_model._deepstack_process = lambda hidden, places, features: add(hidden, places, 2 * features)
        try:
            return super().get_logprobs(request)
        finally:
            del language_model._deepstack_process


def make_class(mutant):
    others = dict.fromkeys(name for name in dir(TrainerConformance) if name.startswith("test_") and name != mutant.check)
    mutated = evolve(PROVIDER, backend=f"{mutant.__module__}:{mutant.__name__}")
    return type(mutant.__name__, (TrainerConformance,), {"provider": pytest.fixture(lambda self: mutated), **others})


for mutant_class in WrongTrainer.__subclasses__():
    globals()[f"Test{mutant_class.__name__}"] = make_class(mutant_class)
