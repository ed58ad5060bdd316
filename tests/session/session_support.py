"""Recipes of small models and fakes for sessions."""

from pathlib import Path
from typing import Any

from attrs import evolve

from rlcore.config.load import Origin
from rlcore.registry.discovery import Registry
from rlcore.spi import LossSpec, Provider
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.algorithm import NoOptions
from rlcore.testing.fakes.providers import FAKE_EXECUTION, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.tokenizer import VOCABULARY_SIZE
from rlcore_session import Session
from rlcore_session.plan import plan_of
from rlcore_session.provider import PROVIDER

FAKE_LOSS = LossSpec(path="rlcore.testing.fakes.algorithm:fake_likelihood", config=NoOptions())
"""A loss in numpy, which the fake trainer differentiates."""


def recipe_of(model: Path, **sections: Any) -> dict[str, Any]:
    """A recipe of a session, with further sections."""
    return {
        "model": {"path": str(model)},
        "run": {"device": "cpu", "num_steps": 4},
        "rollout": {"max_prompt_tokens": 8, "max_response_tokens": 4},
        "optimizer": {"learning_rate": 1e-2},
        **sections,
    }


def open_fakes(
    trainer: Provider = FAKE_TRAINER, generator: Provider = FAKE_GENERATOR, *, reference: bool = False, **sections: Any
) -> Session:
    """A session of the fakes, or of others made from them."""
    registry = Registry.from_providers(
        {"trainer": [trainer], "generator": [generator], "algorithm": [PROVIDER], "execution": [FAKE_EXECUTION]}
    )
    recipe = {"trainer": {"name": "fake"}, "generator": {"name": "fake"}, "run": {"device": "cpu"}}
    rollout = {"max_prompt_tokens": 12, "max_response_tokens": 8}
    values = recipe_of(Path("none"), **recipe, rollout=rollout) | sections
    plan = plan_of(values, (), Origin(label="a test", directory=Path.cwd()), reference=reference, registry=registry)
    return Session(plan, FakeTokenizer(), VOCABULARY_SIZE)


def without(provider: Provider, *capabilities: str) -> Provider:
    """A provider less some capabilities."""
    return evolve(provider, capabilities=provider.capabilities.difference(capabilities))
