"""Trainers that are each wrong in one known way about Muon, moments in 8 bits or groups; run by test_mutant_suites."""

import pytest
from attrs import evolve

from rlcore.spi import MuonSpec, hookimpl
from rlcore_conformance import TrainerConformance
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.optimizer import Optimizer
from rlcore_fsdp2.provider import PROVIDER

ORTHOGONAL, MEAN = "test_muon_orthogonalizes_each_matrix", "test_muon_keeps_a_mean_of_gradients"
GROUPS, RESUMED = "test_groups_have_their_own_settings", "test_run_resumes_with_its_state"


class WrongTrainer(Fsdp2Backend):
    def __init__(self, context, config):
        spec = context.optimizer
        super().__init__(evolve(context, optimizer=evolve(spec, **self.changed(spec))), config)

    def changed(self, spec):
        return {}


class TrainsAllByAdamW(WrongTrainer):
    check = ORTHOGONAL

    def changed(self, spec):
        return {"name": "adamw"}


class KnowsOneScale(WrongTrainer):
    check = ORTHOGONAL

    def changed(self, spec):
        return {"muon": None}


class IteratesOnce(WrongTrainer):
    check = ORTHOGONAL

    def changed(self, spec):
        return {"muon": evolve(spec.muon or MuonSpec(), newton_schulz_steps=1)}


class TrainsEmbeddingsByMuon(WrongTrainer):
    check = ORTHOGONAL

    @hookimpl
    def train_step(self, request):
        result = super().train_step(request)
        self.policy.get_input_embeddings().weight.data.mul_(1.1)
        return result


class ForgetsTheMean(WrongTrainer):
    check = MEAN

    def changed(self, spec):
        return {"muon": MuonSpec(momentum=0.0)}


class DecaysMatricesTwice(WrongTrainer):
    check = "test_muon_decays_matrices_apart_from_the_gradient"

    def changed(self, spec):
        return {"weight_decay": 2 * spec.weight_decay}


class KeepsMomentsInFloat32(WrongTrainer):
    check = "test_moments_in_8_bits_are_near_those_in_float32"

    def changed(self, spec):
        return {"moments": "float32"}


class ForgetsState(WrongTrainer):
    check = RESUMED

    @hookimpl
    def load_state(self, request):
        result = super().load_state(request)
        next(value for value in vars(self).values() if isinstance(value, Optimizer)).state.clear()
        return result


class IgnoresGroups(WrongTrainer):
    check = GROUPS

    def changed(self, spec):
        return {"groups": ()}


class LastGroupCounts(WrongTrainer):
    check = GROUPS

    def changed(self, spec):
        if not spec.groups:
            return {}
        first, *others = spec.groups
        return {"groups": (*others[::-1], evolve(first, parameters=(*first.parameters, "model.norm.weight")))}


class KeepsTheTablesBetas(WrongTrainer):
    check = GROUPS

    def changed(self, spec):
        return {"groups": tuple(evolve(group, betas=None) for group in spec.groups)}


class TakesAnyPattern(WrongTrainer):
    check = "test_pattern_without_a_tensor_is_refused"

    def changed(self, spec):
        return {"groups": ()}


def make_class(mutant):
    others = dict.fromkeys(name for name in dir(TrainerConformance) if name.startswith("test_") and name != mutant.check)
    mutated = evolve(PROVIDER, backend=f"{mutant.__module__}:{mutant.__name__}")
    return type(mutant.__name__, (TrainerConformance,), {"provider": pytest.fixture(lambda self: mutated), **others})


for mutant_class in WrongTrainer.__subclasses__():
    globals()[f"Test{mutant_class.__name__}"] = make_class(mutant_class)
