"""One conformance class a mutant, reduced to the check that has to fail; run by test_mutants in one process."""

import mutant_adapters  # noqa: F401 - registers its mutants
import mutant_algorithms  # noqa: F401 - registers its mutants
import mutant_channels
import mutant_collectors
import mutant_environments  # noqa: F401 - registers its mutants
import mutant_executions
import mutant_generators  # noqa: F401 - registers its mutants
import mutant_gradient_norms  # noqa: F401 - registers its mutants
import mutant_loop_observers
import mutant_optimizers  # noqa: F401 - registers its mutants
import mutant_ranks  # noqa: F401 - registers its mutants
import mutant_sinks
import mutant_split_steps  # noqa: F401 - registers its mutants
import mutant_texts
import mutant_trainers  # noqa: F401 - registers its mutants
import pytest
from attrs import evolve
from fake_kits import (
    FakeAlgorithmConformance,
    FakeEnvironmentConformance,
    FakeGeneratorConformance,
    FakeTrainerConformance,
)
from mutants import MUTANTS
from ranked_trainer import FAKE_RANKED_TRAINER, RankedFakeTrainer

from rlcore.spi import ChannelReceiver, ChannelSender
from rlcore.testing.fakes.algorithm import FakeAlgorithm
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer
from rlcore_conformance import (
    ChannelConformance,
    CollectorConformance,
    ExecutionConformance,
    LoopObserverConformance,
    RendererConformance,
    SinkConformance,
    TokenizerConformance,
)

KITS = {
    RankedFakeTrainer: (FakeTrainerConformance, FAKE_RANKED_TRAINER),
    FakeTrainer: (FakeTrainerConformance, FAKE_TRAINER),
    FakeGenerator: (FakeGeneratorConformance, FAKE_GENERATOR),
    FakeAlgorithm: (FakeAlgorithmConformance, FAKE_ALGORITHM),
    FakeEnvironment: (FakeEnvironmentConformance, FAKE_ENVIRONMENT),
    mutant_executions.OwnProcess: (ExecutionConformance, mutant_executions.PROVIDER),
    mutant_sinks.LastFigures: (SinkConformance, mutant_sinks.PROVIDER),
    mutant_collectors.Episodes: (CollectorConformance, mutant_collectors.PROVIDER),
    mutant_loop_observers.Counts: (LoopObserverConformance, mutant_loop_observers.PROVIDER),
    mutant_texts.Loads: (TokenizerConformance, mutant_texts.TOKENIZERS),
    mutant_texts.Renders: (RendererConformance, mutant_texts.RENDERER),
}
"""The kit and the provider by what a mutant is made from; the first that fits counts."""
FIXTURES = {"options": "config", "timeout_s": "timeout_s"}
"""Fixtures of the kit that a mutant sets, by the name of its attribute."""


def make_channel_class(name, mutant):
    """The channel of mutant_channels with one of its ends replaced by the mutant."""
    end = "sender" if issubclass(mutant, ChannelSender) else "receiver"
    mutated = evolve(mutant_channels.PROVIDER, **{end: f"{mutant.__module__}:{mutant.__name__}"})
    others = [check for check in dir(ChannelConformance) if check.startswith("test_") and check != mutant.killed_by]
    assert hasattr(ChannelConformance, mutant.killed_by), f"{name} names no check of the kit: {mutant.killed_by}"
    return type(name, (ChannelConformance,), {"provider": pytest.fixture(lambda self: mutated), **dict.fromkeys(others)})


def make_class(name, mutant):
    if issubclass(mutant, ChannelSender | ChannelReceiver):
        return make_channel_class(name, mutant)
    kit, provider = next(found for base, found in KITS.items() if issubclass(mutant, base))
    field = next(name for name in ("backend", "collector", "observer") if hasattr(provider, name))
    changes = {field: f"{mutant.__module__}:{mutant.__name__}"}
    if hasattr(provider, "capabilities"):
        changes["capabilities"] = provider.capabilities | getattr(mutant, "declares", frozenset())
    mutated = evolve(provider, **changes)
    others = [check for check in dir(kit) if check.startswith("test_") and check != mutant.killed_by]
    assert hasattr(kit, mutant.killed_by), f"{name} names no check of the kit: {mutant.killed_by}"
    given = {
        "provider": mutated,
        **{fixture: getattr(mutant, key) for key, fixture in FIXTURES.items() if hasattr(mutant, key)},
    }
    fixtures = {key: pytest.fixture(lambda self, value=value: value) for key, value in given.items()}
    return type(name, (kit,), {**fixtures, **dict.fromkeys(others)})


for test_name, mutant_class in MUTANTS.items():
    globals()[test_name] = make_class(test_name, mutant_class)
