"""Trainers of adapters that are each wrong in one known way; run by test_mutant_suites."""

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from rlcore.spi import GlobalCounts, NonFiniteError, UseAdapterRequest, hookimpl
from rlcore_conformance import TrainerConformance
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.optimizer import Optimizer
from rlcore_fsdp2.provider import PROVIDER
from rlcore_torchkit.refit.digest import make_buckets

BEGINNING = "test_adapters_begin_without_effect"
PRODUCTS = "test_weights_change_by_low_rank_products"
BY_TURNS = "test_adapters_by_turns_train_as_alone"
SMALLER = "test_smaller_rank_is_kept"
TOGETHER = "test_adapters_together_train_as_by_turns"
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


class BeginsAtTheWholeRank(WrongTrainer):
    check = SMALLER

    @hookimpl
    def use_adapter(self, request):
        return super().use_adapter(evolve(request, rank=None))


class ForgetsTheRank(WrongTrainer):
    check = SMALLER

    @hookimpl
    def load_state(self, request):
        result = super().load_state(request)
        self.adapters.rank = self.adapters.spec.rank
        return result


class SharesOneAdapter(WrongTrainer):
    """All tokens of a pass have the adapter of the first."""

    check = TOGETHER

    @hookimpl
    def forward_backward_together(self, request):
        train_together = self.adapters.train_together
        self.adapters.train_together = lambda parts: train_together([evolve(one, weights=parts[0].weights) for one in parts])
        try:
            return super().forward_backward_together(request)
        finally:
            del self.adapters.train_together


class SharesOneDropout(WrongTrainer):
    """All adapters drop what one of the first's seed drops."""

    check = TOGETHER

    @hookimpl
    def forward_backward_together(self, request):
        dropout, seeds = self.adapters.dropout, []

        def of_first(seed, *key):
            seeds.append(seed)
            return dropout(seeds[0], *key)

        self.adapters.dropout = of_first
        try:
            return super().forward_backward_together(request)
        finally:
            del self.adapters.dropout


class DividesByTheCountsOfAll(WrongTrainer):
    """Each loss is divided by the tokens of all adapters."""

    check = TOGETHER

    @hookimpl
    def forward_backward_together(self, request):
        counts = GlobalCounts(
            num_loss_tokens=sum(piece.counts.num_loss_tokens for piece in request.pieces.values()),
            num_loss_sequences=sum(piece.counts.num_loss_sequences for piece in request.pieces.values()),
        )
        pieces = {name: evolve(piece, counts=counts) for name, piece in request.pieces.items()}
        return super().forward_backward_together(evolve(request, pieces=pieces))


class ComputesAtOneTemperature(WrongTrainer):
    """The temperature of all pieces is that of the first."""

    check = TOGETHER

    @hookimpl
    def forward_backward_together(self, request):
        first = next(iter(request.pieces.values())).temperature
        pieces = {name: evolve(piece, temperature=first) for name, piece in request.pieces.items()}
        return super().forward_backward_together(evolve(request, pieces=pieces))


class BeginsWithEachPiece(WrongTrainer):
    """Gradients of earlier pieces are dropped."""

    check = TOGETHER

    @hookimpl
    def forward_backward_together(self, request):
        pieces = {name: evolve(piece, piece=0) for name, piece in request.pieces.items()}
        return super().forward_backward_together(evolve(request, pieces=pieces))


class StaysWithTheLast(WrongTrainer):
    """The last adapter of the request is in use behind it."""

    check = TOGETHER

    @hookimpl
    def forward_backward_together(self, request):
        result = super().forward_backward_together(request)
        self.use_adapter(UseAdapterRequest(name=[*request.pieces][-1]))
        return result


class KeepsHalfOfAFailure(WrongTrainer):
    """Behind an error the pieces before the wrong one are added all the same."""

    check = "test_failure_together_leaves_all_gradients"

    @hookimpl
    def forward_backward_together(self, request):
        try:
            return super().forward_backward_together(request)
        except NonFiniteError:
            name = next(iter(request.pieces))
            super().forward_backward_together(evolve(request, pieces={name: request.pieces[name]}))
            raise


class DropsAllWithAFailure(WrongTrainer):
    """Behind an error the gradients of earlier pieces are nothing."""

    check = "test_failure_together_leaves_all_gradients"

    @hookimpl
    def forward_backward_together(self, request):
        try:
            return super().forward_backward_together(request)
        except NonFiniteError:
            for parameter in self.policy.parameters():
                parameter.grad = None if parameter.grad is None else 0 * parameter.grad
            raise


def make_class(mutant):
    others = dict.fromkeys(name for name in dir(TrainerConformance) if name.startswith("test_") and name != mutant.check)
    mutated = evolve(PROVIDER, backend=f"{mutant.__module__}:{mutant.__name__}")
    return type(mutant.__name__, (TrainerConformance,), {"provider": pytest.fixture(lambda self: mutated), **others})


for mutant_class in WrongTrainer.__subclasses__():
    globals()[f"Test{mutant_class.__name__}"] = make_class(mutant_class)
