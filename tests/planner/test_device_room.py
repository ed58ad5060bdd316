"""How much of a device trainer and generator leave each other."""

import pytest

from rlcore.spi import PlanOption
from rlcore_plan.device_room import TRAINER_SHARE, beside_bytes, generator_room, trainer_room

GIB = 2**30
TRAINER = PlanOption(
    memory={"weights": 20 * GIB, "activations": 30 * GIB}, idle={"none": 20 * GIB, "state": 5 * GIB}, seconds={"training": 1.0}
)
ENGINE = PlanOption(memory={"KV cache": 15 * GIB}, idle={"none": 2 * GIB}, seconds={"generation": 1.0})


@pytest.mark.parametrize(("offload", "kept"), [("none", 20 * GIB), ("state", 5 * GIB)])
def test_beside_an_idle_trainer_is_what_it_does_not_keep(offload, kept) -> None:
    assert generator_room(80 * GIB, TRAINER, offload, sleeps=True) == 71 * GIB - kept


def test_what_a_trainer_does_not_tell_is_not_known() -> None:
    assert generator_room(80 * GIB, TRAINER, "all", sleeps=True) is None


def test_beside_an_engine_that_stays_awake_are_both_peaks() -> None:
    room = generator_room(80 * GIB, TRAINER, "state", sleeps=False)
    assert room == int(TRAINER_SHARE * 80 * GIB) - 50 * GIB
    assert trainer_room(80 * GIB, ENGINE, sleeps=False) == int(TRAINER_SHARE * 80 * GIB) - 15 * GIB
    assert trainer_room(80 * GIB, ENGINE, sleeps=True) == int(TRAINER_SHARE * 80 * GIB) - 2 * GIB


@pytest.mark.parametrize(("memory", "beside"), [(16, 1.92), (79.6, 9.0), (140.4, 11.23), (185, 14.8)])
def test_processes_have_their_place_beside_state_and_engine(memory: float, beside: float) -> None:
    assert beside_bytes(int(memory * GIB)) / GIB == pytest.approx(beside, abs=0.01)


def test_nothing_is_left_where_too_little_is() -> None:
    assert (
        generator_room(10 * GIB, TRAINER, "none", sleeps=True) == generator_room(10 * GIB, TRAINER, "none", sleeps=False) == 0
    )
