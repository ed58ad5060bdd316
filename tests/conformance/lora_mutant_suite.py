"""Trainers of adapters that are each wrong in one known way; run by test_mutant_suites."""

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from rlcore.spi import hookimpl
from rlcore_conformance import TrainerConformance
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.optimizer import Optimizer
from rlcore_fsdp2.provider import PROVIDER
from rlcore_torchkit.refit.digest import make_buckets

BEGINNING = "test_adapters_begin_without_effect"
PRODUCTS = "test_weights_change_by_low_rank_products"
BY_TURNS = "test_adapters_by_turns_train_as_alone"
NORMS = "test_norms_of_adapters_are_those_of_their_factors"
RESUMED = "test_resumed_adapters_take_the_step_that_would_have_followed"


class WrongTrainer(Fsdp2Backend):
    check: str
    """The kit's check that has to fail."""


class ExportsTheModelAlone(WrongTrainer):
    check = BEGINNING
    first = None

    @hookimpl
    def export_weights(self, request):
        export = super().export_weights(request)
        if self.first is None:
            self.first = {named.name: named.tensor.clone() for bucket in export.buckets for named in bucket.tensors}
        return evolve(export, buckets=make_buckets(self.first.items(), request.max_bucket_bytes))


class TakesThePolicyForTheReference(WrongTrainer):
    check = BEGINNING

    @hookimpl
    def get_logprobs(self, request):
        return super().get_logprobs(evolve(request, model="policy"))


class TrainsTheLastNormToo(WrongTrainer):
    check = PRODUCTS

    @hookimpl
    def train_step(self, request):
        result = super().train_step(request)
        with torch.no_grad():
            self.policy.get_parameter("model.norm.weight").add_(1e-6)
        return result


class WritesOlderAdapters(WrongTrainer):
    check = PRODUCTS

    @hookimpl
    def save_state(self, request):
        result = super().save_state(request)
        if request.kind == "peft":
            file = request.directory / "adapter_model.safetensors"
            save_file({name: 0.9 * tensor for name, tensor in load_file(file).items()}, file)
        return result


class ForgetsAdapters(WrongTrainer):
    check = RESUMED

    @hookimpl
    def load_state(self, request):
        result = super().load_state(request)
        self.adapters.initialise(self.policy)
        return result


class ForgetsMoments(WrongTrainer):
    check = RESUMED

    @hookimpl
    def load_state(self, request):
        result = super().load_state(request)
        optimizer = next(value for value in vars(self).values() if isinstance(value, Optimizer))
        optimizer.state.clear()
        return result


class NamesNormsAsPeftDoes(WrongTrainer):
    check = NORMS

    @hookimpl
    def train_step(self, request):
        result = super().train_step(request)
        norms = {f"base_model.model.{name}": norm for name, norm in (result.gradient_norms or {}).items()}
        return evolve(result, gradient_norms=norms or None)


class HasNormsOfFrozenWeights(WrongTrainer):
    check = NORMS

    @hookimpl
    def train_step(self, request):
        result = super().train_step(request)
        norms = {"model.norm.weight": 0.0, **(result.gradient_norms or {})}
        return evolve(result, gradient_norms=norms if request.gradient_norms else None)


class SharesMoments(WrongTrainer):
    """All adapters have the optimizer's state of the one that trains."""

    check = BY_TURNS

    @hookimpl
    def use_adapter(self, request):
        optimizer = self.optimizer()
        kept = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        result = super().use_adapter(request)
        if request.seed is None:
            optimizer.state.update(kept)
        return result

    def optimizer(self):
        return next(value for value in vars(self).values() if isinstance(value, Optimizer))


class LosesGradients(WrongTrainer):
    """Whoever comes back finds the gradients of its pieces dropped."""

    check = BY_TURNS

    @hookimpl
    def use_adapter(self, request):
        result = super().use_adapter(request)
        for parameter in self.policy.parameters():
            parameter.grad = None if parameter.grad is None else 0 * parameter.grad
        return result


class SharesDropout(WrongTrainer):
    """All adapters drop the inputs that the last one begun drops."""

    check = BY_TURNS

    @hookimpl
    def use_adapter(self, request):
        seed = self.adapters.seed
        result = super().use_adapter(request)
        if request.seed is None:
            self.adapters.seed = seed
        return result


class BeginsAsTheFirst(WrongTrainer):
    """A new adapter has the weights of the one before it."""

    check = BY_TURNS

    @hookimpl
    def use_adapter(self, request):
        before = {name: p.detach().clone() for name, p in self.policy.named_parameters() if p.requires_grad}
        result = super().use_adapter(request)
        if request.seed is not None:
            with torch.no_grad():
                for name, values in before.items():
                    self.policy.get_parameter(name).copy_(values)
        return result


def make_class(mutant):
    others = dict.fromkeys(name for name in dir(TrainerConformance) if name.startswith("test_") and name != mutant.check)
    mutated = evolve(PROVIDER, backend=f"{mutant.__module__}:{mutant.__name__}")
    return type(mutant.__name__, (TrainerConformance,), {"provider": pytest.fixture(lambda self: mutated), **others})


for mutant_class in WrongTrainer.__subclasses__():
    globals()[f"Test{mutant_class.__name__}"] = make_class(mutant_class)
