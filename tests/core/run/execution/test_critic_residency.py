"""A critic beside policy and generator on one device: who holds what when, and that it changes no figure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.spi import (
    LoadStateRequest,
    LoadStateResult,
    Provider,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
    TrainStepRequest,
    TrainStepResult,
    ValuesRequest,
    ValuesResult,
    capabilities,
    hookimpl,
)
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]

ON_GPU = ("run.device=cuda", "model.dtype=float32", "algorithm.fake.critic=true", "critic.learning_rate=0.01")
SHORT = (
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "evaluation.every_n_steps=0",
    "run.num_steps=2",
    "training.minibatches_per_step=1",
)
calls: list[str] = []


class WatchedTrainer(FakeTrainer):
    """Notes what is asked of policy and critic."""

    def note(self, what: str) -> None:
        calls.append(f"{'critic' if self.context.head == 'value' else 'policy'} {what}")

    @hookimpl
    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        self.note(f"{request.weights}/{request.state}")
        return super().set_residency(request)

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        self.note("trains")
        return super().train_step(request)

    @hookimpl
    def get_values(self, request: ValuesRequest) -> ValuesResult:
        self.note("tells")
        return super().get_values(request)

    @hookimpl
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        self.note("is saved")
        return super().save_state(request)

    @hookimpl
    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        self.note("is loaded")
        return super().load_state(request)


class WatchedGenerator(FakeGenerator):
    """Notes where it is."""

    @hookimpl
    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        calls.append(f"generator {request.weights}/{request.state}")
        return super().set_residency(request)


WATCHED = evolve(FAKE_TRAINER, backend=f"{__name__}:{WatchedTrainer.__name__}")


GENERATOR = evolve(FAKE_GENERATOR, backend=f"{__name__}:{WatchedGenerator.__name__}")


def registry(trainer: Provider = WATCHED) -> Registry:
    return Registry.from_providers(
        {"trainer": [trainer], "generator": [GENERATOR], "algorithm": [FAKE_ALGORITHM], "environment": [FAKE_ENVIRONMENT]}
    )


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def of_critic() -> list[str]:
    return [call.removeprefix("critic ") for call in calls if call.startswith("critic") and call != "critic is saved"]


def generators_places(what: str) -> list[str]:
    """Where the generator is whenever policy or critic are saved, or loaded; "" before it was moved."""
    return [
        next((one for one in reversed(calls[:index]) if one.startswith("generator")), "")
        for index, call in enumerate(calls)
        if call.endswith(what)
    ]


@pytest.mark.parametrize("offloads", ["critic.offload=all", "offload.trainer=all"])
def test_it_is_saved_and_loaded_while_the_generator_sleeps(run: Run, offloads: str) -> None:
    run(*ON_GPU, *SHORT, offloads, registry=registry())
    assert generators_places("is saved") == ["generator host/host"] * 2
    calls.clear()
    run(*ON_GPU, *SHORT, offloads, "run.num_steps=3", resume=True, registry=registry())
    assert generators_places("is loaded") == ["generator host/host"] * 2


def test_it_leaves_the_device_whenever_it_does_not_work(run: Run) -> None:
    run(*ON_GPU, *SHORT, "critic.offload=all", registry=registry())
    away, back = "host/host", "device/device"
    # First for the generator's start; then it works before and after the policy does.
    assert of_critic() == [away, *[back, "tells", away, back, "trains", away] * 2]
    assert calls.index("policy trains") > calls.index("critic tells")


def test_it_leaves_the_device_to_the_generator_as_the_policy_does(run: Run) -> None:
    run(*ON_GPU, *SHORT, "offload.trainer=state", registry=registry())
    away, back = "device/host", "device/device"
    assert of_critic() == [away, away, *[back, "tells", "trains", away] * 2]


@pytest.mark.parametrize("options", [("critic.offload=none",), ("critic.offload=all", "run.device=cpu")])
def test_it_stays_where_nothing_says_otherwise(run: Run, options: tuple[str, ...]) -> None:
    run(*ON_GPU, *SHORT, "offload.generator_sleep_mode=false", *options, registry=registry())
    assert of_critic() == ["tells", "trains"] * 2


def test_a_trainer_that_cannot_move_is_left_alone(run: Run) -> None:
    fixed = evolve(WATCHED, capabilities=WATCHED.capabilities - {capabilities.RESIDENCY})
    run(*ON_GPU, *SHORT, "critic.offload=all", registry=registry(fixed))
    assert of_critic() == ["tells", "trains"] * 2


def test_moving_changes_no_figure(run: Run, tmp_path: Path) -> None:
    run("run.name=still", *ON_GPU, "offload.generator_sleep_mode=false")
    run("run.name=moving", *ON_GPU, "critic.offload=all", "offload.trainer=state")
    still, moving = (
        [{name: value for name, value in line.items() if not name.startswith("memory/")} for line in read_metrics(path)]
        for path in (tmp_path / "runs" / "still", tmp_path / "runs" / "moving")
    )
    assert still == moving
