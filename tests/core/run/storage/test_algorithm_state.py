"""What an algorithm keeps between steps is saved with each checkpoint and given back, to the last bit."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.report.progress import Progress
from rlcore.run.storage.checkpoint import read_state, write_state
from rlcore.spi import ADVANTAGES, CheckpointError, ContractError, PluginError
from rlcore.testing.fakes.algorithm import FakeAlgorithm
from rlcore.testing.fakes.providers import FAKE_ALGORITHM

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
Stands = Callable[..., Registry]


class MovingBaseline(FakeAlgorithm):
    """Rewards less a mean that moves over the steps, which decides on every update."""

    def __init__(self, context, config):
        super().__init__(context, config)
        self.baseline, self.rewards = 0.0, np.zeros(0, np.float32)

    def build_batch(self, rollouts):
        training = super().build_batch(rollouts)
        column = training.batch.token_columns[ADVANTAGES] - np.float32(self.baseline)
        column = np.where(training.batch.loss_mask, column, np.float32(0))
        self.rewards = np.append(self.rewards, rollouts.rewards.mean(dtype=np.float32))
        self.baseline += (float(self.rewards.mean(dtype=np.float64)) - self.baseline) / 3
        batch = training.batch.with_token_column(ADVANTAGES, column)
        return evolve(training, batch=batch, metrics={"baseline": self.baseline, "seen": float(len(self.rewards))})

    def save_state(self):
        return {"baseline": self.baseline, "rewards": self.rewards}

    def load_state(self, state):
        self.baseline, self.rewards = state["baseline"], state["rewards"]


class Killed(BaseException):
    """Nothing handles it, as nothing handles a kill."""


class DiesAfter(Progress):
    """Ends the process's work, as a kill would, once a step's metrics are written."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.last:
            raise Killed


@pytest.mark.parametrize("killed_after", [1, 3, 4])
def test_killed_and_resumed_equals_uninterrupted(run: Run, registry_with: Stands, tmp_path: Path, killed_after: int) -> None:
    registry = registry_with(algorithm=MovingBaseline)
    run("run.name=whole", registry=registry)
    with pytest.raises(Killed):
        run(registry=registry, progress=DiesAfter(killed_after))
    run(registry=registry, resume=True)
    whole = read_metrics(tmp_path / "runs" / "whole")
    assert [record["seen"] for record in whole[1:]] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(tmp_path / "runs" / "run") == whole


def test_a_step_that_failed_leaves_no_trace_in_the_state(run: Run, registry_with: Stands, tmp_path: Path) -> None:
    """The state that is saved is that of the last whole step, though the algorithm has seen the next."""
    registry = registry_with(algorithm=MovingBaseline)
    options = ("training.minibatches_per_step=1", "checkpoint.every_n_steps=0", "run.num_steps=5")

    class Refuses(Progress):
        def phase(self, name: str) -> None:
            if name == "train" and next(steps) == 3:
                raise RuntimeError("before the update")

    steps = iter(range(100))
    with pytest.raises(RuntimeError, match="before the update"):
        run(*options, registry=registry, progress=Refuses())
    directory = tmp_path / "runs" / "run"
    saved = read_state(directory / "checkpoints" / "step-000003")
    assert saved is not None
    assert len(saved.state["rewards"]) == 3  # type: ignore[arg-type]
    run(*options, registry=registry, resume=True)
    run(*options, "run.name=whole", registry=registry)
    assert read_metrics(directory) == read_metrics(tmp_path / "runs" / "whole")


def test_its_files_have_digests_as_all_others(run: Run, registry_with: Stands, tmp_path: Path) -> None:
    run(registry=registry_with(algorithm=MovingBaseline))
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step-000006"
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert {"algorithm/state.json", "algorithm/arrays.npz"} <= files.keys()


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "a/b": 0.1 + 0.2,
        "count": 2**60,
        "never": math.inf,
        "file": np.array([True, False]),
        "big": np.array([[2**63 - 1]]),
        "half": np.float16([1.5]),
        "none": np.zeros((0, 3), np.float32),
        "scalar": np.array(3.0),
    }
    write_state(tmp_path, "mine", state)
    saved = read_state(tmp_path)
    assert saved is not None
    assert saved.algorithm == "mine"
    assert saved.state.keys() == state.keys()
    for name, value in state.items():
        found = saved.state[name]
        assert type(found) is type(value)
        if isinstance(value, np.ndarray):
            assert isinstance(found, np.ndarray)
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert np.array_equal(found, value)


def test_a_damaged_state_is_said(tmp_path: Path) -> None:
    write_state(tmp_path, "mine", {"x": np.zeros(2)})
    (tmp_path / "algorithm" / "arrays.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="algorithm cannot be read"):
        read_state(tmp_path)


@pytest.mark.parametrize("kept_before", [True, False])
def test_a_state_that_is_there_on_one_side_alone_is_an_error(
    run: Run, registry_with: Stands, tmp_path: Path, kept_before: bool
) -> None:
    stateful, plain = registry_with(algorithm=MovingBaseline), None
    before, after = (stateful, plain) if kept_before else (plain, stateful)
    run("run.num_steps=2", registry=before)
    found = r"the state of algorithm 'fake'.*expects none" if kept_before else r"no state of an algorithm.*expects the one"
    with pytest.raises(CheckpointError, match=f"step-000002 holds {found}.*--allow-changes"):
        run(registry=after, resume=True)
    run(registry=after, resume=True, allow_changes=True)
    last = read_metrics(tmp_path / "runs" / "run")[-1]
    assert last.get("seen") == (None if kept_before else 4)


def test_another_algorithm_is_refused_as_what_the_recipe_changed(run: Run, registry_with: Stands) -> None:
    """With all else that makes another run, and not as a version of the algorithm that lost its state."""
    stateful = registry_with(algorithm=MovingBaseline)
    plain = Registry.from_providers({"algorithm": [evolve(FAKE_ALGORITHM, name="other")]})
    both = evolve(stateful, entries=(*stateful.entries, *plain.entries))
    run("run.num_steps=2", registry=both)
    other = ("algorithm.name=other", "run.seed=1")
    with pytest.raises(CheckpointError) as caught:
        run(*other, registry=both, resume=True)
    assert "\n  - algorithm.name 'fake' -> 'other'\n  - run.seed 0 -> 1\n" in str(caught.value)
    assert "version of the algorithm" not in str(caught.value)


class HalfStateful(FakeAlgorithm):
    def save_state(self):
        return {}


def test_one_method_without_the_other_is_a_misfit(run: Run, registry_with: Stands) -> None:
    with pytest.raises(PluginError, match=r"HalfStateful\.load_state: missing; expected load_state\(state\)"):
        run(registry=registry_with(algorithm=HalfStateful))


class BadState(MovingBaseline):
    kept: object = None

    def save_state(self):
        return self.kept


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "found a NoneType; expected a mapping"),
        ({1: 2.0}, "found the key 1; expected a string"),
        ({"x": "text"}, "'x': found 'text' of type str"),
        ({"x": np.array([object()])}, "'x': found an array of object"),
        ({"x": True}, "'x': found True of type bool"),
    ],
)
def test_what_is_no_state_is_said_before_anything_is_built(
    run: Run, registry_with: Stands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: object, said: str
) -> None:
    monkeypatch.setattr(BadState, "kept", kept)
    with pytest.raises(ContractError, match=f"save_state returned .*: {said}"):
        run(registry=registry_with(algorithm=BadState))
    assert not (tmp_path / "runs").exists()
