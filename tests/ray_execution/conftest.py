"""Runs with the fakes on real Ray, which tests that follow each other share, and plugins that workers find as if installed."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.run.plan.prepare import prepare
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.testing.fakes import FakeTokenizer

RECIPE = """
[model]
path = "none"
[trainer]
name = "ranked"
[generator]
name = "ranked"
[algorithm]
name = "ranked"
[environment]
name = "ranked"
[run]
num_steps = 4
device = "cpu"
[data.evaluation]
[training]
prompts_per_step = 6
minibatches_per_step = 2
max_tokens_per_microbatch = 64
[optimizer]
learning_rate = 0.1
[rollout]
max_prompt_tokens = 16
max_response_tokens = 8
samples_per_prompt = 4
[logging]
rollouts_every_n_steps = 0
[sinks]
names = []
[evaluation]
every_n_steps = 3
[checkpoint]
every_n_steps = 2
"""
NUM_CPUS = 4
SITE = Path(__file__).parent / "site"
started_ray = ExitStack()
"""What ends the Ray that is shared."""
BY_THE_CLOCK = ("time/", "tokens_per_second", "generated_tokens_per_second", "generation/engine_restarts", "refit/")


class Notes(Progress):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The plugins of `ranked_fakes`, as a distribution that this process and all that it starts can find."""
    folder = tmp_path_factory.mktemp("site")
    information = folder / "ranked_fakes-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ranked-fakes\nVersion: 1.0\n")
    groups = {"trainers": "TRAINER", "generators": "GENERATOR", "algorithms": "ALGORITHM", "environments": "ENVIRONMENT"}
    points = "".join(f"[rlcore.{group}]\nranked = ranked_fakes:{name}\n" for group, name in groups.items())
    points += "[rlcore.sinks]\nrecorded = ranked_fakes:RECORDED\n"
    points += "[rlcore.observers]\nwatch = ranked_fakes:Watch\nfailing = ranked_fakes:Failing\n"
    (information / "entry_points.txt").write_text(points)
    before = os.environ.get("PYTHONPATH")
    added = [str(folder), str(SITE)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [before])])
    sys.path[:0] = added
    yield folder
    for path in added:
        sys.path.remove(path)
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def ensure_ray() -> None:
    """Start Ray as a run would start it, unless it runs."""
    import ray

    from rlcore_ray.config import RayConfig
    from rlcore_ray.session import ray_session

    if not ray.is_initialized():
        started_ray.enter_context(ray_session(RayConfig(gpus_per_node=NUM_CPUS, object_store_mib=100), "cpu", None))


@pytest.fixture
def local_ray(installed: Path) -> None:
    """One Ray for all tests that follow each other, of several modules too: it takes seconds to start."""
    ensure_ray()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Ray ends before the first test that does not use it."""
    yield
    if "local_ray" not in getattr(nextitem, "fixturenames", ()):
        started_ray.close()


@pytest.fixture
def prepared(tmp_path: Path, installed: Path) -> Callable[..., RunPlan]:
    """Prepare the recipe with overrides; runs go below tmp_path/runs."""
    recipe = write_recipe(tmp_path)

    def prepare_with(*overrides: str) -> RunPlan:
        return prepare(recipe, [f"run.directory={tmp_path / 'runs'}", *overrides])

    return prepare_with


@pytest.fixture
def run(prepared: Callable[..., RunPlan]) -> Callable[..., dict[str, Any]]:
    """Prepare and train; returns the summary."""

    def run_with(
        *overrides: str, resume: bool = False, progress: Progress | None = None, replay_schedule: Path | None = None
    ) -> dict[str, Any]:
        return train(
            evolve(prepared(*overrides), replay_schedule=replay_schedule),
            resume=resume,
            progress=progress or Progress(),
            tokenizer=FakeTokenizer(),
        )

    return run_with


def write_recipe(folder: Path) -> Path:
    """The recipe, as a file."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    return recipe


def read_metrics(run_directory: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what depends on the clock, or tells of what went wrong."""
    records = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if not name.startswith(BY_THE_CLOCK)} for record in records]


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    """The same figures to rounding."""
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
