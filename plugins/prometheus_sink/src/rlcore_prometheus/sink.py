"""Sink `prometheus`: the metrics of a run and of its engines at /metrics."""

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, start_http_server

from rlcore.files import write_atomically
from rlcore.spi import ConfigError, Problem, SinkContext
from rlcore_prometheus.config import PrometheusConfig
from rlcore_prometheus.names import PREFIX, exported
from rlcore_prometheus.run_files import FailureCounts, engine_metrics, rank_metrics, status_metrics

CLOSE_S = 5.0
"""Most seconds for the server's thread to end."""
EVERY_ADDRESS = ("0.0.0.0", "::")
TARGETS = "prometheus.json"
"""File of the run directory by which Prometheus' file_sd_configs find the run."""


class RunMetrics:
    """A collector of prometheus_client: the last value of each figure, sums of what counts, and what files hold."""

    def __init__(self, context: SinkContext) -> None:
        self._directory = context.run_directory
        self._labels = {"run": context.run_name, "host": socket.gethostname()}
        self._lock = threading.Lock()
        """Held while figures change, since a scrape has a thread of its own."""
        self._gauges: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
        self._counters: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(lambda: defaultdict(float))
        self._texts: dict[str, str] = {}
        """Help of each name: the metric of metrics.jsonl."""
        self._failures = FailureCounts(context.run_directory / "failures.jsonl")

    def update(self, metrics: Mapping[str, float]) -> None:
        """Take the figures of a step."""
        with self._lock:
            for name, value in metrics.items():
                one = exported(name)
                self._texts.setdefault(one.name, f"{name} of metrics.jsonl")
                labels = tuple(one.labels.items())
                if one.is_counter:
                    self._counters[one.name][labels] += value * one.scale
                else:
                    self._gauges[one.name][labels] = value * one.scale
            self._count_work(metrics)

    def _count_work(self, metrics: Mapping[str, float]) -> None:
        """Add up seconds and tokens of steps, so that a rate over any time can be computed."""
        seconds = metrics.get("time/total_s")
        if seconds is None:  # an evaluation alone
            return
        self._add("steps", "Steps that ended in this process.", 1.0)
        for name, text in (("tokens", "trained on, with prompts"), ("generated_tokens", "generated")):
            if (rate := metrics.get(f"{name}_per_second")) is not None:
                self._add(name, f"Tokens {text}.", rate * seconds)
        for name, value in metrics.items():
            if (one := exported(name)).name == f"{PREFIX}step_phase_seconds":
                self._add("phase_seconds", "Seconds of each phase, added up over steps.", value, **one.labels)

    def _add(self, name: str, text: str, value: float, **labels: str) -> None:
        self._texts[PREFIX + name] = text
        self._counters[PREFIX + name][tuple(labels.items())] += value

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, each with the labels of the run."""
        for metric in (*self._figures(), self._failures.metric(), *self._of_files()):
            labelled = Metric(metric.name, metric.documentation, metric.type)
            for sample in metric.samples:
                labelled.add_sample(sample.name, {**self._labels, **sample.labels}, sample.value)
            yield labelled

    def _of_files(self) -> Iterator[Metric]:
        yield from status_metrics(self._directory / "status.json")
        yield from engine_metrics(self._directory / "logs")
        yield from rank_metrics(self._directory / "ranks")

    def _figures(self) -> list[Metric]:
        found = []
        with self._lock:
            for kind, suffix, values in (("gauge", "", self._gauges), ("counter", "_total", self._counters)):
                for name, samples in values.items():
                    metric = Metric(name, self._texts[name], kind)
                    for labels, value in samples.items():
                        metric.add_sample(name + suffix, dict(labels), value)
                    found.append(metric)
        return found


class PrometheusSink:
    """A server of HTTP in a thread of its own, from before the first step until the run ends."""

    def __init__(self, context: SinkContext, config: PrometheusConfig) -> None:
        """Listen. ConfigError where that cannot be."""
        self._metrics = RunMetrics(context)
        registry = CollectorRegistry()
        registry.register(self._metrics)
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            raise _cannot_listen(config, error) from error
        self._targets = context.run_directory / TARGETS
        host = socket.gethostname() if config.host in EVERY_ADDRESS else config.host
        address = f"[{host}]:{self._server.server_port}" if ":" in host else f"{host}:{self._server.server_port}"
        write_atomically(self._targets, json.dumps([{"targets": [address], "labels": {"run": context.run_name}}]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - Prometheus has times in place of steps
        """Take the figures of a step."""
        self._metrics.update(metrics)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - likewise
        """Take the figures of a checkpoint's evaluation."""
        self._metrics.update(metrics)

    def close(self, summary: Mapping[str, object] | None) -> None:  # noqa: ARG002 - Prometheus sees that the run is gone
        """End the server, and take the run out of Prometheus' targets."""
        self._targets.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)


def _cannot_listen(config: PrometheusConfig, error: OSError) -> ConfigError:
    reason = (error.strerror or str(error)).lower()
    problem = Problem(
        path="sinks.prometheus.port",
        found=f"{config.port} on {config.host}: {reason}",
        expected="a free port of an address of this machine",
        remedy="Choose another one, or 0 for any that is free.",
    )
    return ConfigError([problem])
