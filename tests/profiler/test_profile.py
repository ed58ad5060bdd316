"""Observer `profile`: traces of the steps of the range by each process of a run, on a CPU."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_torchkit.testing.models import make_model

from ..system.system_support import DIGITS, STEPS_ALONE, Workplace, expect_failure, read_metrics  # type: ignore[import-not-found]

NAMED = 'observers.names=["profile", "rank_status"]'
RUN = ("run.num_steps=4", *STEPS_ALONE)
HOOKS = {"train_step", "stream", "refit", "export_weights"}
"""Hooks that every step of these runs calls, by the names in the trace."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("digits") / "model", "qwen3", alphabet=DIGITS, max_length=64)


@pytest.fixture
def workplace(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.chdir(tmp_path)
    return Workplace.make(tmp_path, model)


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with ray_session(RayConfig(gpus_per_node=2, object_store_mib=100), "cpu", None):
        yield


def traces(run: Path) -> dict[str, list[str]]:
    """The names of a trace's events by its path below `profiles`."""
    folder = run / "profiles"
    found = {}
    for file in sorted(folder.rglob("*.gz")):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        found[str(file.relative_to(folder))] = [event["name"] for event in events if event.get("ph") == "X"]
    assert not list(folder.rglob(".step"))
    return found


def test_one_process_traces_each_step_of_the_range(workplace: Workplace) -> None:
    run = workplace.train("grpo.toml", *RUN, NAMED, "observers.profile.steps=[2, 3]")
    found = traces(run)
    assert found.keys() == {"step-000002/rank-0.json.gz", "step-000003/rank-0.json.gz"}
    for names in found.values():
        assert set(names) >= HOOKS - {"stream"}
        assert names.count("train_step") == 1
        assert any(name.startswith("aten::") for name in names)


def test_a_trace_changes_no_figure(workplace: Workplace) -> None:
    alone = workplace.train("grpo.toml", *RUN)
    traced = workplace.train("grpo.toml", *RUN, "run.name=traced", NAMED, "observers.profile.steps=[1, 4]")
    assert read_metrics(traced) == read_metrics(alone)


def test_fine_tuning_is_traced(workplace: Workplace) -> None:
    options = (*RUN, NAMED, "observers.profile.steps=[4, 4]", "observers.profile.with_stack=true")
    # A process of its own, as a user's: torch's tracer of Python hooks into every thread that there is.
    subprocess.run([Path(sys.executable).with_name("rlcore"), "train", "sft.toml", *options], check=True, capture_output=True)
    found = traces(workplace.run("sft"))
    assert found.keys() == {"step-000004/rank-0.json.gz"}
    assert "train_step" in found["step-000004/rank-0.json.gz"]


def test_a_resumed_run_traces_the_steps_that_it_makes(workplace: Workplace) -> None:
    workplace.train("grpo.toml", *RUN, "run.num_steps=2", "checkpoint.at_end=true")
    run = workplace.train("grpo.toml", *RUN, "--resume", NAMED, "observers.profile.steps=[1, 3]")
    assert traces(run).keys() == {"step-000003/rank-0.json.gz"}


@pytest.mark.usefixtures("ray")
def test_the_driver_and_two_ranks_trace_the_same_steps(workplace: Workplace) -> None:
    run = workplace.train("grpo.toml", *RUN, "cluster.gpus_per_node=2", NAMED, "observers.profile.steps=[2, 3]")
    found = traces(run)
    processes = ("driver", "rank-0", "rank-1")
    assert found.keys() == {f"step-00000{step}/{name}.json.gz" for step in (2, 3) for name in processes}
    for path, names in found.items():
        assert ("train_step" in names) == ("rank" in path), path
        if "rank" in path:
            assert names.count("train_step") == 1
    states = [json.loads((run / f"ranks/rank-{rank}.json").read_text()) for rank in range(2)]
    assert [state["rank"] for state in states] == [0, 1]
    assert len({state["process"] for state in states}) == 2
    for state in states:
        assert state["hook"] == "idle"
        assert state["memory_bytes"]["resident"] > 0
        assert {"train_step", "export_weights"} <= state["seconds"].keys()


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("observers.profile.steps=[3, 2]", "observers.profile.steps"),
        ("observers.profile.steps=[0, 2]", "observers.profile.steps[0]"),
        ("observers.profile.steps=[1, 2, 3]", "observers.profile.steps"),
        ("observers.profile.steps=[]", "observers.profile.steps"),
        ("observers.profile.steps=[2, 5]", "observers.profile.steps"),
        ('observers.profile.profiler="nsight"', "observers.profile.profiler"),
    ],
)
def test_what_cannot_be_profiled_is_refused(workplace: Workplace, option: str, path: str) -> None:
    expect_failure(workplace.rlcore("check", "grpo.toml", "run.num_steps=4", NAMED, option), 2, path)
