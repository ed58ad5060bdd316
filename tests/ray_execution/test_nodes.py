"""The nodes of a pool: the driver's software, its folder and its time, or a message that names those which differ."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import ConfigError, PluginError
from rlcore_ray.commands import Arrival, Software
from rlcore_ray.failures import WorkerInfo
from rlcore_ray.nodes import CLOCK_S, note_clocks, require_same, require_shared

from .conftest import Notes  # type: ignore[import-not-found]

WORKERS = [WorkerInfo(rank=rank, node=f"10.0.0.{rank}", log_file=Path("log")) for rank in range(3)]


def test_another_version_of_the_core_is_named_with_its_nodes() -> None:
    here = Software.here()
    other = Software(versions=(*((name, "0.0" if name == "rlcore" else version) for name, version in here.versions),))
    require_same(WORKERS, [here] * 3)
    with pytest.raises(PluginError, match=r"node\(s\) 10.0.0.1, 10.0.0.2: rlcore 0.0"):
        require_same(WORKERS, [here, other, other])


class Ranks:
    """Ranks, of which some see no file of the driver's."""

    workers = WORKERS

    def __init__(self, *apart: int) -> None:
        self.apart = apart

    def all(self, name: str, file: Path, **_: object) -> list[bool]:
        assert name == "sees"
        return [file.is_file() and worker.rank not in self.apart for worker in WORKERS]


def test_nodes_without_the_drivers_folder_are_named(tmp_path: Path) -> None:
    ranks: Any = Ranks()
    require_shared(ranks, tmp_path / "run" / "logs")
    apart: Any = Ranks(1, 2)
    require_shared(apart, None)
    with pytest.raises(ConfigError) as raised:
        require_shared(apart, tmp_path / "run" / "logs")
    (problem,) = raised.value.problems
    assert problem.path == "run.directory"
    assert f"{tmp_path / 'run'}, which node(s) 10.0.0.1, 10.0.0.2 " in problem.found
    assert list((tmp_path / "run" / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "noted"),
    [
        ((0.0, 1.0, -1.0), None),
        ((0.0, CLOCK_S, -CLOCK_S), None),
        ((0.0, 610.0, 0.0), "node 10.0.0.1 is 600 s ahead"),
        ((0.0, 0.0, -600.0), "node 10.0.0.2 is 600 s behind"),
    ],
)
def test_clocks_that_differ_are_noted_with_their_nodes(seconds: tuple[float, ...], noted: str | None) -> None:
    """The driver began to wait at 1000 s and had all answers 10 s later."""
    notes = Notes()
    arrived = [
        Arrival(worker=worker, software=Software.here(), clock=1000.0 + offset)
        for worker, offset in zip(WORKERS, seconds, strict=True)
    ]
    note_clocks(arrived, 1000.0, 1010.0, notes)
    assert len(notes.texts) == (0 if noted is None else 1)
    assert noted is None or noted in notes.texts[0]
