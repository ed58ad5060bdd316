"""Generators and trainers that are each wrong about routing in one known way; run by test_mutant_suites.

The fakes, of which the other mutants are made, have no experts.
"""

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ROUTED_EXPERTS, hookimpl
from rlcore_conformance import GeneratorConformance, TrainerConformance
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.provider import PROVIDER as MEGATRON
from rlcore_transformers.backend import TransformersBackend
from rlcore_transformers.provider import PROVIDER as TRANSFORMERS


class WrongGenerator(TransformersBackend):
    @hookimpl
    def generate(self, request):
        result = super().generate(request)
        if result.routed_experts is None:
            return result
        experts = result.routed_experts.experts.copy()
        self.spoil(experts, result.routed_experts.offsets)
        return evolve(result, routed_experts=evolve(result.routed_experts, experts=experts))


class ReportsTheTokenBefore(WrongGenerator):
    def spoil(self, experts, offsets):
        experts[:] = np.roll(experts, 1, axis=0)


class ForgetsTheTokenReadLast(WrongGenerator):
    def spoil(self, experts, offsets):
        for end in offsets[1:]:
            experts[end - 2] = -1


class ReportsAnotherSample(WrongGenerator):
    def spoil(self, experts, offsets):
        first, second = (slice(offsets[index], offsets[index + 1]) for index in (6, 7))
        length = min(first.stop - first.start, second.stop - second.start)
        swapped = experts[first][:length].copy()
        experts[first][:length], experts[second][:length] = experts[second][:length], swapped


class ReportsLayersInReverse(WrongGenerator):
    def spoil(self, experts, offsets):
        experts[:] = experts[:, ::-1].copy()


class WrongTrainer(MegatronBackend):
    @hookimpl
    def get_logprobs(self, request):
        return super().get_logprobs(self.spoiled(request))

    @hookimpl
    def train_step(self, request):
        return super().train_step(self.spoiled(request))

    def spoiled(self, request):
        return evolve(request, microbatches=tuple(self.spoil(batch) for batch in request.microbatches))

    def spoil(self, batch):
        column = batch.token_columns.get(ROUTED_EXPERTS)
        return batch if column is None else batch.with_token_column(ROUTED_EXPERTS, self.changed(column))


class IgnoresRouting(WrongTrainer):
    def changed(self, column):
        return np.full_like(column, -1)


class TrainsOnItsOwnRouting(WrongTrainer):
    @hookimpl
    def get_logprobs(self, request):
        return MegatronBackend.get_logprobs(self, request)

    def changed(self, column):
        return np.full_like(column, -1)


class TakesUnknownForExperts(WrongTrainer):
    def changed(self, column):
        return np.where(column < 0, np.arange(column.shape[-1], dtype=np.int16), column)


class RoutesLayersInReverse(WrongTrainer):
    def changed(self, column):
        return column[:, ::-1].copy()


class KeepsTheLastRouting(WrongTrainer):
    last = None

    def spoil(self, batch):
        column = batch.token_columns.get(ROUTED_EXPERTS)
        if column is None and self.last is not None:
            return batch.with_token_column(ROUTED_EXPERTS, np.resize(self.last, (batch.num_tokens, *self.last.shape[1:])))
        self.last = column
        return batch


def make_class(mutant):
    generates = issubclass(mutant, WrongGenerator)
    kit, provider = (GeneratorConformance, TRANSFORMERS) if generates else (TrainerConformance, MEGATRON)
    check = "test_routed_experts_equal_the_reference" if generates else "test_routed_tokens_equal_the_reference"
    others = dict.fromkeys(name for name in dir(kit) if name.startswith("test_") and name != check)
    mutated = evolve(provider, backend=f"{mutant.__module__}:{mutant.__name__}")
    return type(mutant.__name__, (kit,), {"provider": pytest.fixture(lambda self: mutated), **others})


MUTANTS = {mutant.__name__: mutant for base in (WrongGenerator, WrongTrainer) for mutant in base.__subclasses__()}
for test_name, mutant_class in MUTANTS.items():
    globals()[f"Test{test_name}"] = make_class(mutant_class)
