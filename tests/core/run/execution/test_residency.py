"""Trainer and generator that share a device take turns: who holds what when, and that it changes no figure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.execution.residency import GIB
from rlcore.spi import Provider, SetResidencyRequest, SetResidencyResult, capabilities
from rlcore.testing.fakes.algorithm import FakeAlgorithm
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


class Watch:
    """Writes down every hook with the residency it asks for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def note(self, request: object, name: str) -> None:
        if isinstance(request, SetResidencyRequest):
            name = f"{request.weights}/{request.state}" + ("/discard" if request.discard_weights else "")
        self.calls.append(name)


def registry(watch: Watch, generator: Provider = FAKE_GENERATOR, trainer: Provider = FAKE_TRAINER) -> Registry:
    providers = {
        "trainer": [trainer],
        "generator": [generator],
        "algorithm": [FAKE_ALGORITHM],
        "environment": [FAKE_ENVIRONMENT],
    }
    return Registry.from_providers(providers, observers=[observer(watch)])  # type: ignore[arg-type]


def observer(watch: Watch) -> object:
    import pluggy

    mark = pluggy.HookimplMarker("rlcore")

    class Observer:
        @mark(wrapper=True)
        def train_step(self, request):
            watch.note(request, "train_step")
            return (yield)

        @mark(wrapper=True)
        def export_weights(self, request):
            watch.note(request, "export_weights")
            return (yield)

        @mark(wrapper=True)
        def stream(self, request):
            watch.note(request, "stream")
            return (yield)

        @mark(wrapper=True)
        def set_residency(self, request):
            watch.note(request, "")
            return (yield)

    return Observer()


QUIET = ("evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every_n_steps=0", "checkpoint.at_end=false")
SHORT = (*QUIET, "run.num_steps=2", "training.minibatches_per_step=1", "checkpoint.every_n_steps=0")


def test_the_generator_sleeps_while_the_trainer_works(run: Run) -> None:
    watch = Watch()
    run("run.device=cuda", "model.dtype=float32", *SHORT, registry=registry(watch))
    # The trainer moves nothing, and gives back what it holds unused, before each of the generator's two stages.
    wake = ["device/device", "device/host", "export_weights", "device/device", "device/device"]
    step = ["host/host/discard", "train_step", *wake]
    assert watch.calls == ["device/device", "export_weights", "stream", *step, "stream", *step]


def test_a_trainer_that_cannot_move_is_left_alone(run: Run) -> None:
    watch = Watch()
    fixed = evolve(FAKE_TRAINER, capabilities=FAKE_TRAINER.capabilities - {capabilities.RESIDENCY})
    run("run.device=cuda", "model.dtype=float32", *SHORT, registry=registry(watch, trainer=fixed))
    step = ["host/host/discard", "train_step", "device/host", "export_weights", "device/device"]
    assert watch.calls == ["export_weights", "stream", *step, "stream", *step]


def test_the_trainer_makes_room_too(run: Run) -> None:
    watch = Watch()
    run("run.device=cuda", "model.dtype=float32", "offload.trainer=all", *SHORT, registry=registry(watch))
    wake = ["device/host", "device/host", "export_weights", "host/host", "device/device"]
    step = ["host/host/discard", "device/device", "train_step", *wake]
    assert watch.calls == ["host/host", *wake, "stream", *step, "stream", *step]  # the first for the generator's start


def test_a_generator_that_keeps_its_weights_is_not_refitted_for_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `discard_weights` a step that makes no update leaves the generator with the right weights."""
    build = FakeAlgorithm.build_batch
    monkeypatch.setattr(
        FakeAlgorithm, "build_batch", lambda self, rollouts: evolve(build(self, rollouts), no_signal="nothing to learn")
    )
    watch = Watch()
    keeping = evolve(FAKE_GENERATOR, capabilities=FAKE_GENERATOR.capabilities - {capabilities.DISCARD_WEIGHTS})
    run("run.device=cuda", "model.dtype=float32", *SHORT, registry=registry(watch, keeping))
    assert watch.calls.count("export_weights") == 1
    assert "host/host" in watch.calls


@pytest.mark.parametrize(
    "overrides", [("run.device=cpu",), ("run.device=cuda", "model.dtype=float32", "offload.generator_sleep_mode=false")]
)
def test_nothing_moves_where_nothing_is_gained(run: Run, overrides: tuple[str, ...]) -> None:
    watch = Watch()
    run(*overrides, *SHORT, registry=registry(watch))
    assert not [call for call in watch.calls if "/" in call]


def test_taking_turns_changes_no_figure(run: Run, tmp_path: Path) -> None:
    run("run.name=still", "run.device=cuda", "model.dtype=float32", "offload.generator_sleep_mode=false")
    run("run.name=turns", "run.device=cuda", "model.dtype=float32", "offload.trainer=state")
    memory = ("memory/",)
    records = [
        [{name: value for name, value in record.items() if not name.startswith(memory)} for record in read_metrics(path)]
        for path in (tmp_path / "runs" / "still", tmp_path / "runs" / "turns")
    ]
    assert records[0] == records[1]
    last = read_metrics(tmp_path / "runs" / "turns", timed=True)[-1]
    assert last["memory/generator_idle_gib"] == 0.0
    assert last["time/offload_s"] > 0.0


@pytest.mark.parametrize(("reserved", "expected"), [(None, 2.0), (3 * GIB, 3.0)])
def test_what_a_trainer_leaves_is_what_its_allocator_keeps(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserved: int | None, expected: float
) -> None:
    left = SetResidencyResult(device_bytes=2 * GIB, reserved_bytes=reserved)
    monkeypatch.setattr("rlcore.testing.fakes.trainer.count_residency", lambda *_, **__: left)
    run("run.device=cuda", "model.dtype=float32", *SHORT, registry=registry(Watch()))
    assert read_metrics(tmp_path / "runs" / "run", timed=True)[-1]["memory/trainer_idle_gib"] == expected
