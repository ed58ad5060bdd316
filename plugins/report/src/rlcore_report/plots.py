"""A run's curves: in the terminal as text, and as a PNG, which the sink `curve` draws."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from rlcore.run.report.metrics_file import read_metrics_file
from rlcore.spi import SPI_VERSION, Provider, SinkContext

Point = tuple[float, float]

PHASE_COLOURS = {
    "generation": "#4c78a8",
    "rewards": "#f58518",
    "logprobs": "#54a24b",
    "train": "#e45756",
    "refit": "#72b7b2",
    "offload": "#b279a2",
    "other": "#a9a9a4",
}
"""Colour of each phase of a step, as in the page of `rlcore report`."""
TERMINAL_MARKERS = (("dot", "•"), ("braille", "⠒"))
"""plotext's name and a sample: dots for the first series, which lies in front, fine lines for the others."""
NUM_INTERVALS = 4
"""Intervals between the labels of the values' axis in the terminal."""


def _finite(points: Iterable[Point]) -> tuple[Point, ...]:
    return tuple((x, y) for x, y in points if math.isfinite(y))


@frozen(kw_only=True)
class Series:
    """One curve; points whose value is not finite are left out."""

    label: str
    points: tuple[Point, ...] = field(converter=_finite)
    """Pairs (step, value), ordered by step."""


@frozen(kw_only=True)
class Panel:
    """Curves that share their axes."""

    title: str
    series: tuple[Series, ...]
    stacked: bool = False
    """Draw the curves as bands, each on top of the one before."""
    limits: tuple[float, float] | None = None
    """Range of the values' axis; None fits it to the data."""

    @property
    def empty(self) -> bool:
        """Return whether there is no point at all."""
        return not any(series.points for series in self.series)


CURVES: Mapping[str, Mapping[str, str]] = {
    "Reward and held-out accuracy": {"eval/pass@1": "held-out pass@1", "reward_mean": "mean reward"},
    "Loss": {"eval/loss": "held-out", "loss": "training"},
    "Response length (tokens)": {"response_length_mean": "mean"},
    "Entropy (nats)": {"entropy": "policy"},
    "Gradient norm": {"grad_norm": "before clipping"},
    "token_mult_prob_error": {"token_mult_prob_error": "generation against trainer"},
}
"""Panels by title: which metric is drawn under which label."""
NUM_MAIN = 2
"""One of the first so many is the main panel."""


def main_panel(records: Iterable[Mapping[str, float]]) -> Panel:
    """Reward and accuracy over the steps, or where nothing is rewarded the loss, which says little beside them; `records` as
    in metrics.jsonl."""
    lines = list(records)
    reward, loss = list(CURVES)[:NUM_MAIN]
    series = _series(lines, CURVES[reward])
    if not series and (losses := _series(lines, CURVES[loss])):
        return Panel(title=loss, series=losses)
    # Shares on one scale, so that the curves of different runs compare; rewards may lie anywhere.
    shares = all(0.0 <= value <= 1.0 for one in series for _, value in one.points)
    return Panel(title=reward, series=series, limits=(0.0, 1.0) if shares else None)


def run_panels(records: Iterable[Mapping[str, float]]) -> tuple[Panel, ...]:
    """Every panel of which the records hold a metric, the main one first and the seconds of a step last."""
    lines = list(records)
    seconds = {f"time/{name}_s": name for name in PHASE_COLOURS}
    others = list(CURVES.items())[NUM_MAIN:]
    panels = [main_panel(lines), *(Panel(title=title, series=_series(lines, labels)) for title, labels in others)]
    panels.append(Panel(title="Seconds of a step", series=_series(lines, seconds), stacked=True))
    return tuple(panel for panel in panels if not panel.empty)


def _series(records: Sequence[Mapping[str, float]], labels: Mapping[str, str]) -> tuple[Series, ...]:
    """The metrics of `labels`, where the records have them."""
    every = (
        Series(label=label, points=tuple((record["step"], record[name]) for record in records if name in record))
        for name, label in labels.items()
    )
    return tuple(series for series in every if series.points)


def terminal_curve(records: Iterable[Mapping[str, float]], width: int) -> str:
    """The main panel as plain text of so many columns; "" where the records hold nothing of it."""
    panel = main_panel(records)
    return "" if panel.empty else terminal_plot(panel, width=width)


def terminal_plot(panel: Panel, *, width: int = 80, height: int = 16) -> str:
    """The panel as plain text without colours, at most as wide as the terminal."""
    import plotext

    if panel.empty:
        return f"{panel.title}: no data"
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    markers = [TERMINAL_MARKERS[min(index, len(TERMINAL_MARKERS) - 1)] for index in range(len(panel.series))]
    for (marker, _), series in reversed(list(zip(markers, panel.series, strict=True))):
        xs, ys = zip(*series.points, strict=True)
        figure.draw(figure.signal(list(xs), list(ys), marker=marker).lines())
    # In the title, because a legend inside the axes hides part of the curves.
    figure.title("   ".join(f"{sign} {series.label}" for (_, sign), series in zip(markers, panel.series, strict=True)))
    figure.label("step", "x")
    ticks = _step_ticks(panel)
    figure.ruler("x").ticks(ticks, [str(tick) for tick in ticks])
    low, high = panel.limits or _bounds([y for series in panel.series for _, y in series.points])
    figure.ruler("y").lim(low, high)
    values = [low + (high - low) * part / NUM_INTERVALS for part in range(NUM_INTERVALS + 1)]
    decimals = max(0, 2 - math.floor(math.log10(high - low)))
    figure.ruler("y").ticks(values, [f"{value:.{decimals}f}" for value in values])
    lines = plotext.uncolorize(figure.build()).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis: that of the values, or some space around a single value, from 0 on where none is
    negative."""
    low, high = min(values), max(values)
    room = 0.0 if high > low else abs(high) * 0.05 or 1.0
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _step_ticks(panel: Panel, most: int = 8) -> list[int]:
    """Round step numbers over the panel's range, both ends included; the terminal's plot does without matplotlib's locators."""
    steps = [int(x) for series in panel.series for x, _ in series.points]
    first, last = min(steps), max(steps)
    stride = next(
        factor * 10**power for power in range(12) for factor in (1, 2, 5) if (last - first) <= most * factor * 10**power
    )
    inner = range(-(-(first + 1) // stride) * stride, last, stride)
    return sorted({first, last, *(tick for tick in inner if last - tick > stride / 2 and tick - first > stride / 2)})


def save_png(path: Path, panels: Sequence[Panel], *, title: str = "") -> None:
    """Write the panels, two a row, as a PNG. Raises OSError where the file cannot be written."""
    # The object interface needs no pyplot: no global state, no window system, safe beside other users of matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(6.4 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw_bands(axes, panel) if panel.stacked else _draw_lines(axes, panel)
        if panel.limits:
            axes.set_ylim(panel.limits[0] - 0.02, panel.limits[1] + 0.02)
        axes.ticklabel_format(useOffset=False)  # an axis says its values, and not what to add to them
        axes.set_title(panel.title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="best", framealpha=0.8)
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=120, format="png")


def _draw_lines(axes: Any, panel: Panel) -> None:
    for place, series in enumerate(panel.series):
        xs, ys = zip(*series.points, strict=True)
        marker = "o" if len(xs) <= 30 else ""
        # The first lies in front, as in the terminal: few points, which a curve of every step would cover.
        axes.plot(xs, ys, label=series.label, marker=marker, markersize=3, linewidth=1.4, zorder=3 - place / 10)


def _draw_bands(axes: Any, panel: Panel) -> None:
    steps = sorted({x for series in panel.series for x, _ in series.points})
    values = [[dict(series.points).get(step, 0.0) for step in steps] for series in panel.series]
    labels = [series.label for series in panel.series]
    axes.stackplot(steps, values, labels=labels, colors=[PHASE_COLOURS[label] for label in labels], alpha=0.85)


@frozen(kw_only=True)
class CurveConfig:
    """`[sinks.curve]`: draws curve.png once the run is complete."""


class CurveSink:
    """Draws the whole run, also the steps before it was resumed."""

    def __init__(self, context: SinkContext, config: CurveConfig) -> None:  # noqa: ARG002 - there are no options
        self._context = context

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing is drawn before the end."""

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing is drawn before the end."""

    def close(self, summary: Mapping[str, object] | None) -> None:
        """Draw what metrics.jsonl holds."""
        if summary is not None:
            directory = self._context.run_directory
            panels = run_panels(read_metrics_file(directory / "metrics.jsonl"))
            save_png(directory / "curve.png", panels, title=self._context.run_name)


CURVE = Provider(
    name="curve",
    spi=SPI_VERSION,
    config=CurveConfig,
    backend="rlcore_report.plots:CurveSink",
    priority=50,
)
