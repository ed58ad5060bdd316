"""Where trainer and generator run: in this process, as often as they are opened, or on Ray where the recipe has a cluster."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import evolve

from rlcore.run.execution.backends import execution
from rlcore.run.execution.groups import InProcessTrainer
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.spi import ClusterConfig
from rlcore.testing.fakes import FakeTokenizer

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


def test_with_a_cluster_pools_are_opened_within_one_session(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[tuple[str, Any]] = []

    @contextmanager
    def context(name: str, *arguments: Any) -> Iterator[str]:
        events.append((name, arguments))
        yield name
        events.append((f"{name} ends", ()))

    for module, function in (("pool", "open_pool"), ("session", "ray_session")):
        stand_in = ModuleType(module)
        setattr(stand_in, function, lambda *arguments, name=module: context(name, *arguments))
        monkeypatch.setitem(sys.modules, f"rlcore_ray.{module}", stand_in)
    cluster, tokenizer, progress, plain = ClusterConfig(gpus_per_node=2), FakeTokenizer(), Progress(), prepared()
    plan = evolve(plain, recipe=evolve(plain.recipe, cluster=cluster))
    with execution(plan, tokenizer, tmp_path, progress) as opened:
        for _ in range(2):
            with opened() as backends:
                assert backends == "pool"
    assert [name for name, _ in events] == ["session", "pool", "pool ends", "pool", "pool ends", "session ends"]
    assert events[0][1] == (cluster, plan.device, tmp_path)
    assert events[1][1] == (plan, tokenizer, tmp_path, progress)
