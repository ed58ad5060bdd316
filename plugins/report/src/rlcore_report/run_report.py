"""The report at the end of a run: charts, accuracy before and after, times of phases, and paths of files."""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlcore.registry.plugin_errors import first_line
from rlcore.registry.run_parts import functions
from rlcore.run.report.timing import STEP_PHASES
from rlcore.schema.printable import class_name

WIDEST_CHART = 80
"""Columns; more make a chart no clearer."""


def run_report(
    summary: Mapping[str, object], records: Sequence[Mapping[str, float]], *, width: int = WIDEST_CHART
) -> RenderableType:
    """The report; `summary` as in summary.json, `records` as in metrics.jsonl. A chart has `width` columns at most."""
    parts: list[RenderableType] = [Text()]
    for chart in _charts(records, min(width, WIDEST_CHART)):
        parts += [chart, Text()]
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if isinstance(before, float) and isinstance(after, float):
        gain = f" ({100 * (after - before):+.1f} points)"
        parts += [Text.assemble("held-out accuracy (pass@1): ", (f"{before:.3f} -> {after:.3f}", "bold"), gain), Text()]
    before, after = summary.get("held_out_loss_before"), summary.get("held_out_loss_after")
    if isinstance(before, float) and isinstance(after, float):
        parts += [Text.assemble("held-out loss: ", (f"{before:.4f} -> {after:.4f}", "bold")), Text()]
    medians, sums = summary.get("step_time_median_s"), summary.get("seconds_by_phase")
    if isinstance(medians, Mapping) and isinstance(sums, Mapping):
        parts += [_times(medians, sums), Text(), *_speed(summary, records), Text()]
    parts += [Text(line) for line in _whole(summary)]
    parts.append(Text.assemble("run directory: ", (str(summary.get("run_directory", "")), "bold")))
    return Group(*parts)


def _charts(records: Sequence[Mapping[str, float]], width: int) -> Iterator[Text]:
    """Yield each installed chart, or why there is none: the run is over, and nothing of it depends on what draws."""
    states = functions("chart") if records else ()
    for state in states:
        if state.entry.function is None:
            if state.kind != "disabled":
                yield Text(f"{state.entry.label} is {state.text}")
            continue
        try:
            if chart := state.entry.function(records, width):
                yield Text(chart, no_wrap=True)
        except Exception as error:
            yield Text(f"{state.entry.label}: {class_name(error)}: {first_line(error)}")


def _times(medians: Mapping[str, float], sums: Mapping[str, float]) -> Table:
    """Return the table of where a step's time goes."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("step time")
    for name in ("median (s)", "whole run (s)", "share"):
        table.add_column(name, justify="right")
    total = sums.get("total", 0.0)
    for name in (*STEP_PHASES, "other", "total"):
        seconds = sums.get(name, 0.0)
        if seconds == 0.0:
            continue
        share = f"{100 * seconds / total:.0f} %" if total > 0 else ""
        table.add_row(name, f"{medians.get(name, 0.0):.3f}", f"{seconds:.1f}", share, style="bold" if name == "total" else "")
    return table


def _speed(summary: Mapping[str, object], records: Sequence[Mapping[str, float]]) -> list[Text]:
    speed = summary.get("tokens_per_second_median")
    lengths = [record["response_length_mean"] for record in records if "response_length_mean" in record]
    parts = [f"{speed:,.0f} tokens per second (median)"] if isinstance(speed, float) else []
    parts += [f"{sum(lengths) / len(lengths):.1f} generated tokens a sample"] if lengths else []
    return [Text("; ".join(parts))] if parts else []


def _whole(summary: Mapping[str, object]) -> list[str]:
    """The run's seconds, and the exported model."""
    parts = {"in all": "total_s", "set-up": "setup_s", "evaluation": "evaluation_s", "checkpoints": "checkpoint_s"}
    seconds = [f"{label} {value:.1f} s" for label, key in parts.items() if isinstance(value := summary.get(key), float)]
    lines = [", ".join(seconds)] if seconds else []
    return [*lines, *([f"model: {summary['model']}"] if summary.get("model") else [])]
