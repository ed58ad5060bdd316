"""What starts trainer and generator: the execution that the recipe chooses, called with what it builds them with."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.execution.context import execution
from rlcore.run.execution.groups import InProcessTrainer
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.spi import ClusterConfig, ContractError, PluginError
from rlcore.testing.fakes import FAKE_EXECUTION, FakeTokenizer, fake_registry

Prepare = Callable[..., RunPlan]


def test_without_a_cluster_each_opening_builds_backends_in_this_process(prepared: Prepare) -> None:
    trainers = []
    with execution(prepared(), FakeTokenizer(), None, Progress()) as opened:
        for _ in range(2):
            with opened() as backends:
                assert isinstance(backends.trainer, InProcessTrainer)
                trainers.append(backends.trainer)
            assert not backends.trainer.is_usable
    assert trainers[0].handle is not trainers[1].handle


def with_backend(monkeypatch: pytest.MonkeyPatch, backend: Any) -> Registry:
    """The fakes, with this in place of what the execution's provider names."""
    module = ModuleType("stand_in_execution")
    module.backend = backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stand_in_execution", module)
    provider = evolve(FAKE_EXECUTION, backend="stand_in_execution:backend")
    others = [entry for entry in fake_registry().entries if (entry.role, entry.name) != ("execution", "fake")]
    (own,) = (entry for entry in Registry.from_providers({"execution": [provider]}).entries if entry.name == "fake")
    return evolve(fake_registry(), entries=(*others, own))


def test_an_execution_is_called_once_with_its_section_and_what_it_builds_backends_with(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[Any] = []

    @contextmanager
    def backend(context: Any, config: Any) -> Iterator[Any]:
        events.append((context, config))
        yield lambda: nullcontext("backends")
        events.append("left")

    registry = with_backend(monkeypatch, backend)
    plan = prepared("cluster.gpus_per_node=1", registry=registry)
    tokenizer, progress = FakeTokenizer(), Progress()
    with execution(plan, tokenizer, tmp_path / "run" / "logs", progress) as opened, opened() as backends:
        assert backends == "backends"
    (context, config), left = events
    assert left == "left"
    assert config == ClusterConfig()
    assert context.progress is progress
    assert (context.arguments.decoder, context.arguments.log_directory) == (tokenizer, tmp_path / "run" / "logs")
    assert context.arguments.trainer.context.seed == plan.recipe.run.seed
    assert context.plugins.chosen().run_directory == tmp_path / "run"


def not_a_context(context: Any, config: Any) -> list[Any]:
    return [context, config]


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (not_a_context, "returned a list; expected a context manager of an OpenBackends"),
        (3, "is a int; expected a class"),
        (lambda context: context, "takes"),
    ],
)
def test_what_is_no_execution_is_refused_by_name(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, backend: Any, told: str
) -> None:
    plan = prepared("cluster.execution=fake", registry=with_backend(monkeypatch, backend))
    with (
        pytest.raises(PluginError, match=r"execution 'fake' \(in-process 0\)") as raised,
        execution(plan, FakeTokenizer(), None, Progress()),
    ):
        pass
    assert told in str(raised.value)


@contextmanager
def passes(value: Any) -> Iterator[Any]:
    yield value


@contextmanager
def suppresses(value: Any) -> Iterator[Any]:
    with suppress(RuntimeError):
        yield value


@pytest.mark.parametrize(("outer", "inner"), [(passes, suppresses), (suppresses, passes)])
def test_an_execution_that_suppresses_an_error_is_named(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, outer: Any, inner: Any
) -> None:
    def backend(context: Any, config: Any) -> Any:
        return outer(lambda: inner("backends"))

    plan = prepared("cluster.execution=fake", registry=with_backend(monkeypatch, backend))
    with (
        pytest.raises(ContractError, match=r"execution 'fake' \(in-process 0\) suppressed") as raised,
        execution(plan, FakeTokenizer(), None, Progress()) as opened,
        opened(),
    ):
        raise RuntimeError("of the run")
    assert str(raised.value.__cause__) == "of the run"
