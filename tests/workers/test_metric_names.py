"""Metric names of other libraries, and the page that lists them."""

import importlib
import re
from pathlib import Path

import pytest
from attrs import fields_dict

from rlcore.spi import SinkContext
from rlcore_workers.background_sink import BackgroundSink
from rlcore_workers.metric_names import NAMES, renamed

PAGE = (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text()
TRACKERS = {"wandb": "Wandb", "mlflow": "Mlflow", "trackio": "Trackio", "swanlab": "SwanLab"}


def test_the_page_lists_every_name() -> None:
    section = PAGE.split("### Names of other libraries")[1].split("### ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    table = [row for row in rows if len(row) == 4]
    for column, names_as in enumerate(("trl", "wandb", "verl"), start=1):
        assert {row[0]: row[column] for row in table if row[column]} == NAMES[names_as]


@pytest.mark.parametrize("names_as", NAMES)
def test_no_two_figures_get_one_name(names_as) -> None:
    documented = re.findall(r"`([\w/@]+)`", PAGE.split("## Metrics")[1])
    found = renamed(dict.fromkeys(documented, 1.0), names_as)
    assert len(found) == len(set(documented))
    assert NAMES[names_as].keys() <= set(documented)
    assert set(NAMES[names_as].values()) <= found.keys()
    assert all(name.startswith("rlcore/") for name in found.keys() - set(NAMES[names_as].values()))


def test_by_default_names_stay() -> None:
    assert renamed({"reward_mean": 0.5}, None) == {"reward_mean": 0.5}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_each_tracker_takes_them(tracker, tmp_path, monkeypatch) -> None:
    pytest.importorskip(tracker)
    sinks, config = (importlib.import_module(f"rlcore_{tracker}.{module}") for module in ("sink", "config"))
    written = []

    class Run:
        id = "run"

        def __init__(self, *_: object) -> None:
            pass

        def log(self, step, metrics) -> None:
            written.append((step, metrics))

        def end(self, summary) -> None:
            pass

    monkeypatch.setattr(sinks, f"{TRACKERS[tracker]}Run", Run)
    config_class = getattr(config, f"{TRACKERS[tracker]}Config")
    assert fields_dict(config_class)["names_as"].default is None
    context = SinkContext(run_directory=tmp_path, run_name="run", recipe="")
    sink: BackgroundSink = getattr(sinks, f"{TRACKERS[tracker]}Sink")(context, config_class(names_as="verl"))
    sink.log(1, {"reward_mean": 0.5, "loss": 2.0})
    sink.close(None)
    assert written == [(1, {"critic/score/mean": 0.5, "rlcore/loss": 2.0})]
