"""One conformance class a mutant, reduced to the check that has to fail; run by test_mutants in one process."""

import mutant_generators  # noqa: F401 - registers its mutants
import mutant_optimizers  # noqa: F401 - registers its mutants
import mutant_ranks  # noqa: F401 - registers its mutants
import mutant_trainers  # noqa: F401 - registers its mutants
import pytest
from attrs import evolve
from mutants import MUTANTS

from rlcore.testing.fakes.conformance import FakeGeneratorConformance, FakeTrainerConformance
from rlcore.testing.fakes.providers import FAKE_GENERATOR, FAKE_RANKED_TRAINER, FAKE_TRAINER
from rlcore.testing.fakes.ranked_trainer import RankedFakeTrainer
from rlcore.testing.fakes.trainer import FakeTrainer


def make_class(name, mutant):
    trains = issubclass(mutant, FakeTrainer)
    kit, provider = (FakeTrainerConformance, FAKE_TRAINER) if trains else (FakeGeneratorConformance, FAKE_GENERATOR)
    if issubclass(mutant, RankedFakeTrainer):
        provider = FAKE_RANKED_TRAINER
    mutated = evolve(provider, backend=f"{mutant.__module__}:{mutant.__name__}")
    others = [check for check in dir(kit) if check.startswith("test_") and check != mutant.killed_by]
    assert hasattr(kit, mutant.killed_by), f"{name} names no check of the kit: {mutant.killed_by}"
    return type(name, (kit,), {"provider": pytest.fixture(lambda self: mutated), **dict.fromkeys(others)})


for test_name, mutant_class in MUTANTS.items():
    globals()[test_name] = make_class(test_name, mutant_class)
