"""Ctrl-C that comes together with something else: an error, a move of memory. The cause is said, what is whole is saved."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.interrupt import InterruptGuard
from rlcore.spi import InterruptedRun, hookimpl
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.trainer import FakeTrainer

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
Stands = Callable[..., Registry]
ON_ONE_GPU = ("run.device=cuda", "model.dtype=float32", "offload.trainer=all", "checkpoint.every_n_steps=0")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class FailsAfterCtrlC(FakeTrainer):
    """Gets Ctrl-C in its fifth step, then breaks."""

    broken = True

    @hookimpl
    def export_weights(self, request):
        if self.broken and request.weight_version == 6:
            press()
            raise ZeroDivisionError("the cause")
        return super().export_weights(request)


def test_an_error_after_ctrl_c_is_the_one_that_is_said(
    run: Run, registry_with: Stands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry = registry_with(trainer=FailsAfterCtrlC)
    with pytest.raises(ZeroDivisionError, match="the cause") as caught:
        run(registry=registry)
    assert any("The state after step 2 is in" in note for note in caught.value.__notes__)
    monkeypatch.setattr(FailsAfterCtrlC, "broken", False)
    run(registry=registry, resume=True)
    run("run.name=whole")
    assert read_metrics(tmp_path / "runs" / "run") == read_metrics(tmp_path / "runs" / "whole")


class FailsThenCtrlC(FakeTrainer):
    """Breaks in its third step, and gets Ctrl-C while the state before it is saved."""

    @hookimpl
    def export_weights(self, request):
        if request.weight_version == 6:
            raise ZeroDivisionError("the cause")
        return super().export_weights(request)

    @hookimpl
    def save_state(self, request):
        press()
        return super().save_state(request)


def test_ctrl_c_while_an_error_is_saved_keeps_the_error(run: Run, registry_with: Stands) -> None:
    with pytest.raises(ZeroDivisionError, match="the cause"):
        run("checkpoint.every_n_steps=0", "training.minibatches_per_step=1", registry=registry_with(trainer=FailsThenCtrlC))


def test_a_guard_forgets_the_signal_before_an_error() -> None:
    guard = InterruptGuard()
    with guard.entered():
        with pytest.raises(ValueError, match="the cause"), guard.deferred():
            press()
            raise ValueError("the cause")
        with guard.deferred():  # as where the state is saved after the error
            pass
    assert guard.pressed
    assert not guard.torn


class CtrlCWhileMoving(FakeGenerator):
    """Gets Ctrl-C in the midst of waking up for the third time."""

    moves = 0

    @hookimpl
    def set_residency(self, request):
        result = super().set_residency(request)
        if request.weights == "device":
            type(self).moves += 1
            if type(self).moves == 5:
                press()
        return result


@pytest.mark.parametrize("options", [(), ("evaluation.every_n_steps=0", "evaluation.at_start=false")])
def test_ctrl_c_in_a_move_of_memory_waits_for_its_end(
    run: Run, registry_with: Stands, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CtrlCWhileMoving, "moves", 0)
    registry = registry_with(generator=CtrlCWhileMoving)
    with pytest.raises(InterruptedRun, match="its checkpoint is in"):
        run(*ON_ONE_GPU, *options, registry=registry)
    run(*ON_ONE_GPU, *options, registry=registry, resume=True)
    run(*ON_ONE_GPU, *options, "run.name=whole", registry=registry)
    assert read_metrics(tmp_path / "runs" / "run") == read_metrics(tmp_path / "runs" / "whole")


class CtrlCInTheFirstMove(FakeGenerator):
    """Gets Ctrl-C in the very first move of its memory."""

    @hookimpl
    def set_residency(self, request):
        press()
        press()
        return super().set_residency(request)


def test_a_second_ctrl_c_in_a_move_saves_nothing_through_a_failed_backend(run: Run, registry_with: Stands) -> None:
    with pytest.raises(InterruptedRun, match="step 1; .*--resume"):
        run(*ON_ONE_GPU, registry=registry_with(generator=CtrlCInTheFirstMove))


class StepInterrupted(FakeTrainer):
    """Its library turns the signal into KeyboardInterrupt inside `train_step`."""

    @hookimpl
    def train_step(self, request):
        if request.weight_version == 4:
            raise KeyboardInterrupt
        return super().train_step(request)


def test_after_an_interrupt_inside_a_hook_nothing_is_saved_through_it(run: Run, registry_with: Stands) -> None:
    with pytest.raises(InterruptedRun, match=r"nothing was saved\. --resume"):
        run("checkpoint.every_n_steps=0", registry=registry_with(trainer=StepInterrupted))
