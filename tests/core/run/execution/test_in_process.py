"""Trainer and generator in the driver's process: built, brought to the same weights, and closed whatever happens."""

from collections.abc import Callable
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.execution.in_process import in_process
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ExportWeightsRequest, RefitRequest, RefitResult, hookimpl
from rlcore.spi.execution import RefitCommand
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.trainer import FakeTrainer

closed: list[str] = []
refits: list[RefitRequest] = []


class Trainer(FakeTrainer):
    @hookimpl
    def close(self, request: Any) -> None:
        closed.append("trainer")


class Generator(FakeGenerator):
    @hookimpl
    def refit(self, request: RefitRequest) -> RefitResult:
        refits.append(request)
        return super().refit(request)

    @hookimpl
    def close(self, request: Any) -> None:
        closed.append("generator")


class Unbuildable(Generator):
    def __init__(self, *_: Any) -> None:
        raise OSError("no memory")


@pytest.fixture
def plan(prepared: Callable[..., RunPlan], registry_with: Callable[..., Registry]) -> Callable[..., RunPlan]:
    """Prepare with backends that say when they are closed."""
    closed.clear()
    refits.clear()
    return lambda *overrides, generator=Generator: prepared(
        *overrides, registry=registry_with(trainer=Trainer, generator=generator)
    )


def test_weights_go_from_the_trainer_to_the_generator_which_may_share_them(plan: Callable[..., RunPlan]) -> None:
    with in_process(plan("rollout.temperature=0.5"), FakeTokenizer(), None) as backends:
        assert backends.route is not None
        export = ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=2**20)
        backends.route.sync_weights(RefitCommand(export=export, channel="in_process"))
        assert backends.trainer.temperature == 0.5
        assert not closed
    (request,) = refits
    assert (request.weight_version, request.channel, request.may_alias) == (0, "in_process", True)
    assert closed == ["generator", "trainer"]


def test_both_are_closed_when_the_run_fails(plan: Callable[..., RunPlan]) -> None:
    with pytest.raises(KeyError), in_process(plan(), FakeTokenizer(), None):
        raise KeyError
    assert closed == ["generator", "trainer"]


def test_the_trainer_is_closed_where_the_generator_cannot_be_built(plan: Callable[..., RunPlan]) -> None:
    with pytest.raises(OSError, match="no memory"), in_process(plan(generator=Unbuildable), FakeTokenizer(), None):
        pytest.fail("it is not built")
    assert closed == ["trainer"]


def test_a_run_that_generates_nothing_has_a_trainer_alone(plan: Callable[..., RunPlan]) -> None:
    never = ("evaluation.every_n_steps=0", "evaluation.at_start=false", "evaluation.at_end=false")
    with in_process(plan("algorithm.fake.source=demonstrations", *never), FakeTokenizer(), None) as backends:
        assert backends.generator is None
        assert backends.route is None
    assert closed == ["trainer"]
