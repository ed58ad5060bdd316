"""Collects the data of a report's page as JSON."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlcore.run.report.timing import DRIVER, STEP_PHASES, Span, read_timeline
from rlcore.run.storage.run_directory import PYTHON, RunDirectory
from rlcore.run.storage.saved_run import SavedRun
from rlcore_report.configurations import differences, flat
from rlcore_report.curves import bars, curves, evenly, medians, rounded
from rlcore_report.failures import read_ledger
from rlcore_report.proofs import proofs
from rlcore_report.run_state import run_state
from rlcore_report.samples import readable, spreads
from rlcore_report.token_pieces import pieces_of

MAX_SAMPLE_BYTES = 2_000_000
"""About how much the samples of all runs take together."""
MAX_TIMELINE_STEPS, MAX_RANKS, MAX_REASONS = 12, 16, 50

SECTIONS: Mapping[str, Sequence[str]] = {
    "Learning": (
        *("reward_mean", "eval/pass@1", "success_rate", "loss", "eval/loss", "response_length_mean", "entropy"),
        "checkpoint_eval/*",
        *("grad_norm", "kl", "truncated_fraction", "clip_fraction", "zero_advantage_groups"),
    ),
    "Generator and trainer": (
        *("token_mult_prob_error", "generation_kl_error", "importance_ratio", "importance_truncated", "importance_weight_max"),
        *("sequence_log_ratio", "ratio_max", "receipts/trainer_mean", "receipts/generation_mean"),
    ),
    "Speed": (
        "time/total_s",
        "tokens_per_second",
        "generated_tokens_per_second",
        "time/trainer_idle_s",
        "time/generator_idle_s",
    ),
    "Memory": ("memory/*",),
}
"""The figures that are shown at once, by section; NAME/* is all of a prefix. Every other figure is in a section that is
closed."""


def report_data(directories: Sequence[Path]) -> dict[str, Any]:
    """Return the page's data. CheckpointError where a directory holds no run, or a file of it is damaged."""
    runs = [SavedRun.find(directory) for directory in directories]
    max_bytes = MAX_SAMPLE_BYTES // max(1, len(runs))
    labels = _labels([run.path for run in runs])
    of_runs = [_of_run(run, label, max_bytes) for run, label in zip(runs, labels, strict=True)]
    names = dict.fromkeys(name for run in of_runs for name in run["metrics"])
    return {
        "runs": of_runs,
        "sections": _sections(list(names)),
        "phases": [*STEP_PHASES, "other"],
        "differences": differences([run["recipe"] for run in of_runs]) if len(runs) > 1 else [],
    }


def _of_run(run: SavedRun, label: str, max_bytes: int) -> dict[str, Any]:
    directory = RunDirectory(path=run.path)
    records = directory.read_metrics()
    cutter, reason = pieces_of(run) if run.saved_steps() or run.saved_steps("evaluation") else (None, "")
    state = run_state(directory)
    return {
        "label": label,
        "path": str(run.path),
        "state": state.state,
        "error": "" if state.error is None else state.error.message,
        "metrics": curves(records),
        "medians": medians(records, ("time/total_s", "tokens_per_second")),
        "time": bars(records, [f"time/{name}_s" for name in (*STEP_PHASES, "other")]),
        "timeline": _timeline(read_timeline(directory.timeline_file)),
        "spreads": spreads(run),
        "failures": _failures(run.path),
        "samples": readable(run, cutter, max_bytes),
        "no_pieces": reason,
        "proofs": proofs(run.path),
        "recipe": dict(flat(run.recipe)) | _versions(directory),
    }


def _labels(paths: Sequence[Path]) -> list[str]:
    """As many of a path's last parts as tell the runs apart."""
    parts = [path.absolute().parts for path in paths]
    for num in range(1, max(len(each) for each in parts) + 1):
        labels = ["/".join(each[-num:]) for each in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{'/'.join(each[-1:])} ({number})" for number, each in enumerate(parts, start=1)]


def _sections(names: Sequence[str]) -> list[dict[str, Any]]:
    sections, taken = [], set[str]()
    for title, wanted in SECTIONS.items():
        shown = [
            name for want in wanted for name in names if name == want or (want[-2:] == "/*" and name.startswith(want[:-1]))
        ]
        taken |= set(shown)
        if shown:
            sections.append({"title": title, "metrics": shown, "open": True})
    if rest := sorted(set(names) - taken):
        sections.append({"title": "Other figures", "metrics": rest, "open": False})
    return sections


def _timeline(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Some steps, each with what was done in its time: role, name, seconds since the step's first span, seconds it took."""
    steps = evenly(sorted({span.step for span in spans}), MAX_TIMELINE_STEPS)
    shown = []
    for step in steps:
        of_step = sorted((span for span in spans if span.step == step), key=attrgetter("start"))
        zero = of_step[0].start
        rows = [
            [
                span.role if span.role == DRIVER else f"{span.role} {rank}",
                span.name,
                rounded(span.start - zero),
                rounded(seconds),
            ]
            for span in of_step
            for rank, seconds in enumerate(span.seconds[:MAX_RANKS])
        ]
        shown.append({"step": step, "spans": rows})
    return shown


def _failures(directory: Path) -> dict[str, Any] | None:
    """Return the ends of the run's episodes, with MAX_REASONS reasons; None where it has no such file."""
    ledger = read_ledger(directory)
    if ledger is None:
        return None
    told = ledger.as_json()
    measured = told["evaluations"] or {"kinds": {}, "reasons": []}
    kinds = told["kinds"] | {f"evaluation: {kind}": sums for kind, sums in measured["kinds"].items()}
    reasons = sorted([*told["reasons"], *measured["reasons"]], key=lambda one: -one["episodes"])[:MAX_REASONS]
    return {"kinds": kinds, "reasons": [{**one, "rows": {}, "steps": []} for one in reasons]}


def _versions(directory: RunDirectory) -> dict[str, str]:
    """Versions of what ran, as further keys; none where they were not written down."""
    return {f"version.{name}": version for name, version in directory.versions.items() if name != PYTHON}
