"""One conformance class a mutant, reduced to the check that has to fail; run by test_conformance_mutants in one process."""

import mutant_generators
import mutant_trainers
import pytest
from attrs import evolve

from rlcore.testing.fakes.conformance import FakeGeneratorConformance, FakeTrainerConformance
from rlcore.testing.fakes.providers import FAKE_GENERATOR, FAKE_TRAINER


def make_class(kit, provider, module, name, mutant):
    mutated = evolve(provider, backend=f"{module.__name__}:{name}")
    others = [check for check in dir(kit) if check.startswith("test_") and check != mutant.killed_by]
    assert hasattr(kit, mutant.killed_by), f"{name} names no check of the kit: {mutant.killed_by}"
    members = {"provider": pytest.fixture(lambda self: mutated), **dict.fromkeys(others)}
    return type(f"Test{name}", (kit,), members)


for kit_class, unbroken, mutants in (
    (FakeTrainerConformance, FAKE_TRAINER, mutant_trainers),
    (FakeGeneratorConformance, FAKE_GENERATOR, mutant_generators),
):
    for mutant_name, mutant_class in mutants.MUTANTS.items():
        made = make_class(kit_class, unbroken, mutants, mutant_name, mutant_class)
        made.__name__ = made.__qualname__ = f"Test{mutants.__name__.removeprefix('mutant_').title()}{mutant_name}"
        globals()[made.__name__] = made
