"""Steps of sessions on two ranks as bundles, and replays on two ranks of steps of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rlcore
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.difference import first_difference
from rlcore_bundles.layout import layout_overrides
from rlcore_bundles.replay import replay
from rlcore_bundles.storage import read_bundle
from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session

from .session_support import recipe_of
from .test_recorded_steps import step

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    """A Ray session for two ranks."""
    with ray_session(RayConfig(gpus_per_node=2, object_store_mib=100), "cpu", None):
        yield


def recorded(model: Path, folder: Path, **sections: object) -> Bundle:
    """The bundle of the second step of a session, with the trainer's state."""
    with rlcore.open(recipe_of(model, trainer={"name": "fsdp2"}, **sections)) as session:
        step(session, 0)
        session.record(folder, weights="state")
        step(session, 1)
    return read_bundle(folder)


def verdicts(bundle: Bundle, *overrides: str) -> dict[str, str]:
    """The verdicts of a replay, in which nothing differs by more than rounding."""
    rows = replay(bundle, overrides).rows
    assert first_difference(rows) is None, rows
    return {row.quantity: row.verdict for row in rows}


def test_a_step_of_two_ranks_is_repeated_by_one_process_and_by_two_ranks(model: Path, tmp_path: Path) -> None:
    bundle = recorded(model, tmp_path / "bundle", cluster={"gpus_per_node": 2})
    assert bundle.digests_before
    alone, again = verdicts(bundle), verdicts(bundle, *layout_overrides("fsdp2:ranks=2"))
    assert alone.keys() == again.keys()
    assert (alone["weights before the step"], again["weights before the step"]) == ("equal", "equal")
    compared = ("log-probabilities", "loss", "gradient norm", "gradient of a tensor")
    assert {alone[f"update 1: {name}"] for name in compared} <= {"equal", "rounding"}
    assert {again[f"update 1: {name}"] for name in compared} == {"equal"}
    assert again["weights after the step"] == "equal"


def test_a_step_of_one_process_is_repeated_on_two_ranks(model: Path, tmp_path: Path) -> None:
    bundle = recorded(model, tmp_path / "bundle")
    found = verdicts(bundle, *layout_overrides("fsdp2:ranks=2,tensor_parallel=2"))
    assert found["weights before the step"] == "equal"
    assert "rounding" in {found[f"update 1: {name}"] for name in ("log-probabilities", "gradient norm", "loss")}
