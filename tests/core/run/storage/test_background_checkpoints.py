"""A run goes on while its last checkpoint is completed, and ends with what made one fail."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.storage import checkpoint
from rlcore.run.storage.checkpoint import find_damage, list_checkpoints, sync
from rlcore.spi import StorageError, TrainStepRequest, TrainStepResult, hookimpl
from rlcore.testing.fakes.trainer import FakeTrainer

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
SAVES = ("run.num_steps=3", "checkpoint.every_n_steps=1", "checkpoint.keep=9")


def steps(directory: Path) -> list[str]:
    return [path.name for path in list_checkpoints(directory / "checkpoints")]


def test_the_next_step_trains_before_a_checkpoint_is_complete(
    run: Run, registry_with: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk keeps the first checkpoint waiting until the second step has trained."""
    has_trained = threading.Event()
    directory, seen = tmp_path / "runs" / "run", list[list[str]]()

    def slow(path: Path) -> None:
        if path.name == ".step-000001.partial":
            assert has_trained.wait(300)
        sync(path)

    class Watching(FakeTrainer):
        @hookimpl
        def train_step(self, request: TrainStepRequest) -> TrainStepResult:
            result = super().train_step(request)
            if request.weight_version >= 2:  # two updates a step
                seen.append(steps(directory))
                has_trained.set()
            return result

    monkeypatch.setattr(checkpoint, "sync", slow)
    run(*SAVES, registry=registry_with(trainer=Watching))
    assert seen[0] == []
    assert steps(directory) == ["step-000001", "step-000002", "step-000003"]
    assert not any(map(find_damage, list_checkpoints(directory / "checkpoints")))
    assert [path.name for path in (directory / "checkpoints").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("step", [1, 3])
def test_a_checkpoint_that_the_disk_refuses_ends_the_run_and_the_one_before_it_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int
) -> None:
    directory = tmp_path / "runs" / "run"

    def full(path: Path) -> None:
        if path.name == f".step-{step:06d}.partial":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        sync(path)

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(StorageError) as caught:
        run(*SAVES)
    assert f"checkpoint step-{step:06d} could not be written" in str(caught.value)
    notes = " ".join(getattr(caught.value, "__notes__", ()))
    assert (f"step-{step - 1:06d}" in notes) == (step > 1)
    assert steps(directory)[-1:] == ([f"step-{step - 1:06d}"] if step > 1 else [])
    monkeypatch.undo()
    run(*SAVES, resume=True)
    assert steps(directory)[-1] == "step-000003"
    assert read_metrics(directory)[-1]["step"] == 3
