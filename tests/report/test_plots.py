"""A run's curves as text and as a PNG."""

import io
import math
import re
from importlib.resources import files
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from rlcore.run.report.timing import STEP_PHASES
from rlcore_report.plots import PHASE_COLOURS, Panel, Series, main_panel, run_panels, save_png, terminal_curve, terminal_plot
from rlcore_report.run_report import run_report

RECORDS = [
    {"step": 0, "eval/pass@1": 0.25},
    *(
        {"step": step, "reward_mean": step / 20, "grad_norm": 1.0, "time/total_s": 1.0, "time/train_s": 0.75}
        for step in range(1, 20)
    ),
    {"step": 20, "eval/pass@1": 0.75, "reward_mean": 1.0},
]


def test_panels_hold_the_metrics_that_are_there() -> None:
    panels = run_panels(RECORDS)
    assert [panel.title for panel in panels] == ["Reward and held-out accuracy", "Gradient norm", "Seconds of a step"]
    assert [series.label for series in panels[0].series] == ["held-out pass@1", "mean reward"]
    assert panels[0].series[0].points == ((0, 0.25), (20, 0.75))
    assert panels[2].stacked
    assert [series.label for series in panels[2].series] == ["train"]
    assert run_panels([]) == ()


def test_the_curve_of_a_run_fits_the_terminal() -> None:
    records = [{"step": step, "reward_mean": step / 40} for step in range(1, 41)]
    lines = terminal_curve(records, 60).splitlines()
    assert max(map(len, lines)) <= 60
    (ticks,) = (line for line in lines if line.split()[:1] == ["1"])
    assert ticks.split()[-1] == "40", "the curve is cut off at its end"
    assert terminal_curve([{"step": 1, "grad_norm": 1.0}], 60) == ""


def test_a_finished_run_shows_its_curve() -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(run_report({"run_directory": "runs/run"}, RECORDS))
    assert "• held-out pass@1" in console.file.getvalue()


def test_runs_without_rewards_draw_their_loss() -> None:
    records = [{"step": 0, "eval/loss": 3.0}, {"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0, "eval/loss": 2.25}]
    (panel,) = run_panels(records)
    assert panel == main_panel(records)
    drawn = {series.label: series.points for series in panel.series}
    assert (panel.title, panel.limits) == ("Loss", None)
    assert drawn == {"held-out": ((0, 3.0), (2, 2.25)), "training": ((1, 2.5), (2, 2.0))}
    assert main_panel([{"step": 1, "loss": 1.0, "reward_mean": 0.0}]).title == "Reward and held-out accuracy"


def test_points_that_are_not_finite_are_left_out() -> None:
    assert Series(label="x", points=[(1, math.nan), (2, 1.0), (3, math.inf)]).points == ((2, 1.0),)


@pytest.mark.parametrize("width", [60, 80])
def test_the_terminal_plot(width: int) -> None:
    text = terminal_plot(main_panel(RECORDS), width=width, height=14)
    lines = text.splitlines()
    assert len(lines) == 14
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["•", "held-out", "pass@1", "⠒", "mean", "reward"]
    assert "•" in "".join(lines[2:-3])
    assert [int(tick) for tick in lines[-2].split()] == [0, 5, 10, 15, 20]
    assert "\x1b" not in text


def test_the_curve_rises_with_the_values() -> None:
    panel = Panel(title="t", series=(Series(label="x", points=[(step, float(step)) for step in range(30)]),))
    lines = terminal_plot(panel, width=70, height=20).splitlines()[2:-3]
    columns = [line.index("•") for line in lines if "•" in line]
    assert len(columns) > 10
    assert columns == sorted(columns, reverse=True)


@pytest.mark.parametrize("records", [[{"step": 3, "reward_mean": 0.5}], [{"step": 1, "reward_mean": 0.0}] * 2])
def test_a_single_point_or_a_constant(records: list[dict[str, float]]) -> None:
    assert "•" in terminal_plot(main_panel(records))


def test_shares_have_one_scale_and_other_rewards_their_own() -> None:
    assert main_panel(RECORDS).limits == (0.0, 1.0)
    lines = terminal_plot(main_panel([{"step": 1, "reward_mean": 0.5}, {"step": 2, "reward_mean": 0.5}])).splitlines()
    assert lines[2].startswith("1.0")
    assert lines[-4].startswith("0.0")
    assert main_panel([{"step": 1, "reward_mean": -3.0}]).limits is None


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.0, 0.0), ["1.00", "0.75", "0.50", "0.25", "0.00"]),
        ((2.0, 2.0), ["2.100", "2.050", "2.000", "1.950", "1.900"]),
        ((-123456.0, 0.0), ["0", "-30864", "-61728", "-92592", "-123456"]),
        ((1e-5, 3e-5), ["0.0000300", "0.0000250", "0.0000200", "0.0000150", "0.0000100"]),
        ((1.0000001, 1.0000003), ["1.000000300", "1.000000250", "1.000000200", "1.000000150", "1.000000100"]),
    ],
)
def test_the_values_axis_in_the_terminal_is_labelled_with_values(values: tuple[float, float], labels: list[str]) -> None:
    panel = Panel(title="t", series=(Series(label="x", points=list(enumerate(values))),))
    lines = terminal_plot(panel).splitlines()
    assert [line.partition("┤")[0].strip() for line in lines if "┤" in line] == labels


def test_every_phase_of_a_step_has_a_colour_of_its_own_the_same_as_in_the_page() -> None:
    assert list(PHASE_COLOURS) == [*STEP_PHASES, "other"]
    style = (files("rlcore_report") / "assets" / "style.css").read_text()
    light = style.partition("@media")[0]
    named = dict(re.findall(r"--([\w]+): (#\w+);", light))
    assert {name: named[name] for name in PHASE_COLOURS} == PHASE_COLOURS
    others = [named[name] for name in ("evaluation", "checkpoint", *(f"more{index}" for index in range(4)))]
    assert len({*PHASE_COLOURS.values(), *others}) == len(PHASE_COLOURS) + len(others)


def test_nothing_to_plot() -> None:
    assert terminal_plot(main_panel([])) == "Reward and held-out accuracy: no data"


def test_step_ticks_of_long_runs_are_round() -> None:
    panel = Panel(title="t", series=(Series(label="x", points=[(1, 0.0), (1234, 1.0)]),))
    ticks = terminal_plot(panel).splitlines()[-2].split()
    assert ticks == ["1", "200", "400", "600", "800", "1000", "1234"]


def test_the_png_is_a_picture_of_every_panel(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    save_png(path, run_panels(RECORDS), title="demo")
    picture = imread(path)
    assert picture.shape[0] > 600
    assert picture.shape[1] > 1200
    quarters = [picture[:400, :700], picture[:400, 800:], picture[-400:, :700]]
    assert all(float(quarter[..., :3].std()) > 0.01 for quarter in quarters)


def test_the_png_of_a_run_without_metrics(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    save_png(path, ())
    assert imread(path).ndim == 3


def test_a_png_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        save_png(tmp_path / "gone" / "curve.png", run_panels(RECORDS))
