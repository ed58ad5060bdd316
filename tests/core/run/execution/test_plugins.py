"""The plugins of a run, in the driver's process and in another one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.execution.context import RunPlugins
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ObserverContext, PluginError, hookimpl
from rlcore.testing.fakes import fake_registry


class Watch:
    """Keeps what it is built with."""

    def __init__(self, context: ObserverContext) -> None:
        self.context = context

    @hookimpl(wrapper=True)
    def train_step(self, request):
        return (yield)


@pytest.fixture
def plan(prepared: Callable[..., RunPlan]) -> RunPlan:
    observers = Registry.from_providers({}, observers=[Watch]).observer_entries
    plan = prepared(registry=evolve(fake_registry(), observer_entries=observers))
    assert plan.observers == observers, "until the run begins they are not built"
    return plan


@pytest.mark.parametrize("directory", [Path("/runs/a"), None])
def test_observers_of_the_drivers_process_are_built_with_the_run_directory(plan: RunPlan, directory: Path | None) -> None:
    loaded = RunPlugins.of(plan, directory).load_here(rank=1)
    (built,) = loaded.observers
    assert isinstance(built.observer, Watch)
    assert (built.observer.context.run_directory, built.observer.context.rank) == (directory, 1)
    assert (loaded.trainer, loaded.generator) == (plan.chosen["trainer"], plan.chosen["generator"])


def test_another_process_loads_what_the_driver_chose_or_says_what_it_has(plan: RunPlan) -> None:
    chosen = RunPlugins.of(plan, None).chosen()
    assert (chosen.trainer.name, chosen.trainer.distribution) == ("fake", "in-process")
    with pytest.raises(PluginError, match="generator 'fake' of in-process 0"):
        chosen.load(0)
