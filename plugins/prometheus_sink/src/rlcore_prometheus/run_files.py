"""Facts about a run that its directory holds between two steps: its phase, failures, and metrics of its engines."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from attrs import define, field
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rlcore_prometheus.names import PREFIX

ENGINE_FILES = "*.prom"
OLD_S = 60.0
"""An engine or a rank that has written nothing for so long is gone: a living one writes every few seconds."""

DAMAGED = (ValueError, KeyError, TypeError, AttributeError)
"""Errors of a file in another form than a run writes: the others are shown all the same."""


def _is_old(file: Path) -> bool:
    return time.time() - file.stat().st_mtime > OLD_S


@define(eq=False)
class FailureCounts:
    """Counts the episodes of failures.jsonl by kind and outcome; each look reads the lines that are new."""

    file: Path
    _counts: Counter[tuple[str, str]] = field(factory=Counter, init=False)
    _read: int = field(default=0, init=False)
    """Bytes of the file that are counted."""
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    """Held while lines are counted: each scrape has a thread of its own."""

    def metric(self) -> Metric:
        """Return the counter rlcore_episodes."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._read_on()
            counts = sorted(self._counts.items())
        metric = Metric(f"{PREFIX}episodes", "Episodes by the kind of their end and by what became of them.", "counter")
        for (kind, outcome), number in counts:
            metric.add_sample(f"{PREFIX}episodes_total", {"kind": kind, "outcome": outcome}, number)
        return metric

    def _read_on(self) -> None:
        with self.file.open("rb") as file:
            if file.seek(0, 2) < self._read:  # a run that goes on from a checkpoint writes lines again
                self._read, self._counts = 0, Counter()
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(*DAMAGED):  # `rlcore failures` names damaged lines
                for entry in json.loads(line)["entries"]:
                    self._counts[entry["kind"], entry["outcome"]] += entry["episodes"]


def status_metrics(file: Path) -> Iterator[Metric]:
    """Yield the step and the phase of status.json; nothing where there is none yet."""
    try:
        status = json.loads(file.read_text())
        values = (
            ("steps_done", "Steps that are done.", status["step"]),
            ("steps_planned", "Steps that the run is to have.", status["num_steps"]),
            ("started_timestamp_seconds", "Start of the run's process, in seconds since 1970.", status["started"]),
            ("phase_started_timestamp_seconds", "Start of the present phase, in seconds since 1970.", status["phase_since"]),
        )
    except (OSError, *DAMAGED):
        return
    for name, text, value in values:
        metric = Metric(PREFIX + name, text, "gauge")
        metric.add_sample(PREFIX + name, {}, value)
        yield metric
    phase = Metric(f"{PREFIX}phase", "1 for the present phase.", "gauge")
    phase.add_sample(f"{PREFIX}phase", {"phase": status["phase"]}, 1)
    yield phase


def engine_metrics(logs: Path) -> Iterator[Metric]:
    """Yield the metrics that engines have written below the folder of logs, with their names as the label `engine`."""
    found: dict[str, Metric] = {}
    for file in sorted(logs.rglob(ENGINE_FILES)):
        name = str(file.relative_to(logs).with_suffix(""))
        try:
            families = [] if _is_old(file) else list(text_string_to_metric_families(file.read_text()))
        except (OSError, *DAMAGED):  # its engine has ended meanwhile
            continue
        for family in families:
            metric = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                metric.add_sample(sample.name, {**sample.labels, "engine": name}, sample.value)
    yield from found.values()


def exposition(logs: Path) -> bytes:
    """Return the metrics of engines below the folder of logs as text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_EngineFiles(logs))
    return generate_latest(registry)


@define(eq=False)
class _EngineFiles:
    """A collector of prometheus_client."""

    logs: Path

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all engines."""
        return engine_metrics(self.logs)


def rank_metrics(folder: Path) -> Iterator[Metric]:
    """Yield the memory of each rank, where the observer `rank_status` writes it."""
    metric = Metric(f"{PREFIX}rank_memory_bytes", "Memory of each rank's process and device.", "gauge")
    for file in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(OSError, *DAMAGED):
            state = json.loads(file.read_text())
            for kind, number in () if _is_old(file) else state["memory_bytes"].items():
                labels = {"rank": str(state["rank"]), "kind": kind, "node": state["host"]}
                metric.add_sample(metric.name, labels, number)
    if metric.samples:
        yield metric
