"""One look at a run: all that `rlcore top` shows of it, read from its directory."""

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os.path import lexists
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from rlcore.reading import read_json
from rlcore.run.report.timing import DRIVER, STEP_PHASES, Span, read_timeline
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saved_run import SavedRun
from rlcore_report.failures import read_ledger
from rlcore_report.run_state import RunState, run_state

MAX_SHOWN = 5
"""Most calls, rows and reasons of each kind."""
QUEUES = {
    "async/groups_open": "open groups",
    "async/staleness_mean": "staleness",
    "async/staleness_max": "greatest staleness",
    "async/groups_dropped": "dropped groups",
    "async/groups_refilled": "replaced groups",
}
"""Metrics of what waits, with their names here."""
SPEEDS = {"tokens_per_second": "trained", "generated_tokens_per_second": "generated"}
ENGINE_FIGURES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_share",
    "vllm:num_preemptions_total": "preemptions",
}
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([^ ]+)")
"""A line of Prometheus' text format with one value of these figures, whose labels have no braces."""
RESTART = "generation/engine_restarts"


@frozen(kw_only=True)
class SlowCall:
    """A call of a pool of ranks in the last step."""

    role: str
    name: str
    seconds: float
    """The slowest rank's."""
    rank: int
    """The slowest rank."""
    fastest_s: float


@frozen(kw_only=True)
class RankState:
    """A rank as it last wrote of itself."""

    rank: int
    host: str
    hook: str
    hook_s: float | None
    """Seconds of the hook until the rank wrote; None where it was idle."""
    silent_s: float
    """Seconds since the rank wrote."""
    memory_bytes: Mapping[str, int]


@frozen(kw_only=True)
class Frame:
    """A run at one moment."""

    run: str
    generator: str
    """The name in the recipe."""
    state: RunState
    phases_s: Mapping[str, float]
    """Seconds of the last step by phase, the longest first."""
    queues: Mapping[str, float]
    speeds: Mapping[str, float]
    """Tokens per second of the last step."""
    memory_gib: Mapping[str, float]
    """Metrics of memory of the last step."""
    engines: Mapping[str, Mapping[str, float]]
    """Figures of each engine by its name; those of vLLM with `metrics`."""
    ranks: Sequence[RankState]
    slow_calls: Sequence[SlowCall]
    slow_episodes: Sequence[Mapping[str, Any]]
    """The slowest calls of the environment in the last step that had any above 0.1 s."""
    failures: Mapping[str, int]
    """Failed episodes of the run by kind and outcome."""
    failed_rows: Mapping[str, int]
    """Rows with the most failures, and their number."""
    engine_restarts: int
    worker_starts: int
    """Starts of rank 0's process by its log, restarts included; 0 without a cluster."""

    def as_json(self) -> dict[str, Any]:
        """The frame for a program."""
        state = self.state
        shown = {"state": state.state, "exit_code": state.exit_code, "left_s": state.left_s, "owner": state.owner}
        found = asdict(self, recurse=True)
        del found["state"]
        return {**shown, "status": None if state.status is None else asdict(state.status), **found}


def frame_of(path: Path) -> Frame:
    """Read a run directory. CheckpointError where there is no run, or a line is damaged."""
    run = SavedRun.find(path)
    directory = RunDirectory(path=run.path)
    records = directory.read_metrics()
    last = next((record for record in reversed(records) if "time/total_s" in record), {})
    phases = {name: last[f"time/{name}_s"] for name in (*STEP_PHASES, "other") if last.get(f"time/{name}_s", 0) > 0}
    failures, rows = _failures(directory.path)
    return Frame(
        run=str(path),
        generator=run.recipe.get("generator", {}).get("name", ""),
        state=run_state(directory),
        phases_s=dict(sorted(phases.items(), key=lambda one: -one[1])),
        queues={label: last[name] for name, label in QUEUES.items() if name in last},
        speeds={label: last[name] for name, label in SPEEDS.items() if name in last},
        memory_gib={name.removeprefix("memory/"): value for name, value in last.items() if name.startswith("memory/")},
        engines=dict(_engines(directory.logs)),
        ranks=list(_ranks(directory.path / "ranks")),
        slow_calls=_slow_calls(read_timeline(directory.timeline_file)),
        slow_episodes=_slow_episodes(directory.path / "slowest_calls.json"),
        failures=failures,
        failed_rows=rows,
        engine_restarts=int(sum(record.get(RESTART, 0) for record in records)),
        worker_starts=_starts(directory.logs / "rank-0.log"),
    )


def _engines(logs: Path) -> Iterator[tuple[str, Mapping[str, float]]]:
    for file in sorted(logs.rglob("*.prom")):
        with contextlib.suppress(OSError, ValueError):  # an engine that ends removes its file
            matches = [SAMPLE.match(line) for line in file.read_text().splitlines()]
            found = {ENGINE_FIGURES[one[1]]: float(one[2]) for one in matches if one and one[1] in ENGINE_FIGURES}
            yield str(file.relative_to(logs).with_suffix("")), {**found, "silent_s": _age(file.stat().st_mtime)}


def _ranks(folder: Path) -> Iterator[RankState]:
    states = []
    for file in folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError):
            states.append(json.loads(file.read_text()))
    for state in sorted(states, key=lambda one: one["rank"]):
        since = state["since"]
        yield RankState(
            rank=state["rank"],
            host=state["host"],
            hook=state["hook"],
            hook_s=None if since is None else state["written"] - since,
            silent_s=_age(state["written"]),
            memory_bytes=state["memory_bytes"],
        )


def _age(written: float) -> float:
    return max(0.0, time.time() - written)


def _slow_calls(spans: Sequence[Span]) -> list[SlowCall]:
    """Return the longest calls of pools in the last step of a timeline."""
    last = max((span.step for span in spans), default=0)
    calls = [
        SlowCall(
            role=span.role,
            name=span.name,
            seconds=max(span.seconds),
            rank=span.seconds.index(max(span.seconds)),
            fastest_s=min(span.seconds),
        )
        for span in spans
        if span.step == last and span.role != DRIVER
    ]
    return sorted(calls, key=lambda call: -call.seconds)[:MAX_SHOWN]


def _slow_episodes(file: Path) -> Sequence[Mapping[str, Any]]:
    if not lexists(file):
        return ()
    calls: Sequence[Mapping[str, Any]] = read_json(file).get("calls", ())
    return calls


def _failures(directory: Path) -> tuple[dict[str, int], dict[str, int]]:
    ledger = read_ledger(directory)
    kinds: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for (kind, outcome, _), sums in ({} if ledger is None else ledger.reasons).items():
        kinds[f"{kind}, {outcome}"] += sums.episodes
        rows.update(sums.rows)
    return dict(kinds.most_common()), dict(rows.most_common(MAX_SHOWN))


def _starts(log: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(line.startswith(b"--- ") and b" rank 0 (" in line for line in log.read_bytes().splitlines())
    return 0
