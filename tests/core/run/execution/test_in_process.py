"""Trainer and generator in the driver's process: built, brought to the same weights, and closed whatever happens."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.execution.context import ExecutionContext
from rlcore.run.execution.in_process import open_backends
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.spi import ExportWeightsRequest, RefitRequest, RefitResult, hookimpl
from rlcore.spi.execution import Backends, RefitCommand
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


def opened(plan: RunPlan) -> AbstractContextManager[Backends]:
    """The backends of a plan, in this process."""
    context = ExecutionContext.of(plan, FakeTokenizer(), None, Progress())
    return open_backends(context.arguments, context.plugins.load_here())


def test_weights_go_from_the_trainer_to_the_generator_which_may_share_them(plan: Callable[..., RunPlan]) -> None:
    with opened(plan("rollout.temperature=0.5")) as backends:
        assert backends.route is not None
        export = ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=2**20)
        backends.route.sync_weights(RefitCommand(export=export, channel="in_process"))
        assert backends.trainer.temperature == 0.5
        assert not closed
    (request,) = refits
    assert (request.weight_version, request.channel, request.may_alias) == (0, "in_process", True)
    assert closed == ["generator", "trainer"]


def test_both_are_closed_when_the_run_fails(plan: Callable[..., RunPlan]) -> None:
    with pytest.raises(KeyError), opened(plan()):
        raise KeyError
    assert closed == ["generator", "trainer"]


def test_the_trainer_is_closed_where_the_generator_cannot_be_built(plan: Callable[..., RunPlan]) -> None:
    with pytest.raises(OSError, match="no memory"), opened(plan(generator=Unbuildable)):
        pytest.fail("it is not built")
    assert closed == ["trainer"]


def test_a_run_that_generates_nothing_has_a_trainer_alone(plan: Callable[..., RunPlan]) -> None:
    never = ("evaluation.every_n_steps=0", "evaluation.at_start=false", "evaluation.at_end=false")
    with opened(plan("algorithm.fake.source=demonstrations", *never)) as backends:
        assert backends.generator is None
        assert backends.route is None
    assert closed == ["trainer"]
