"""Sink `prometheus`: what a scrape of it shows, and what it does about its address."""

import json
import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlcore.run.report.recorded_progress import StatusFile
from rlcore.spi import ConfigError, SinkContext
from rlcore_prometheus.config import PrometheusConfig
from rlcore_prometheus.sink import PrometheusSink

STEP = {"reward_mean": 0.5, "updates": 2.0, "time/total_s": 4.0, "time/train_s": 3.0, "tokens_per_second": 10.0}
ENTRY = {"kind": "grader", "outcome": "masked", "episodes": 3}
ENGINE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 128.0
"""

Made = Callable[..., PrometheusSink]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    """Makes sinks of one run directory, closed at the end."""
    made: list[PrometheusSink] = []

    def sink(**options: Any) -> PrometheusSink:
        context = SinkContext(run_directory=tmp_path, run_name="first", recipe="")
        made.append(PrometheusSink(context, PrometheusConfig(**{"port": 0, **options})))
        return made[-1]

    yield sink
    for one in made:
        one.close(None)


def address(directory: Path) -> str:
    (target,) = json.loads((directory / "prometheus.json").read_text())
    assert target["labels"] == {"run": "first"}
    (found,) = target["targets"]
    return str(found)


def scrape(directory: Path) -> dict[str, float]:
    """The value of each sample, by its name and labels but those of the run."""
    with urllib.request.urlopen(f"http://{address(directory)}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("run"), labels.pop("host")) == ("first", socket.gethostname())
            shown = ",".join(f"{name}={labels[name]}" for name in sorted(labels))
            found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


def test_figures_are_gauges_and_what_counts_adds_up(make: Made, tmp_path: Path) -> None:
    sink = make()
    sink.log(1, STEP)
    sink.log(2, {**STEP, "reward_mean": math.nan})
    sink.log_evaluation(1, {"checkpoint_eval/score": 0.25})
    found = scrape(tmp_path)
    assert math.isnan(found.pop("rlcore_reward_mean"))
    assert found == {
        "rlcore_step_seconds": 4.0,
        "rlcore_step_phase_seconds{phase=train}": 3.0,
        "rlcore_phase_seconds_total{phase=train}": 6.0,
        "rlcore_updates_total": 4.0,
        "rlcore_steps_total": 2.0,
        "rlcore_tokens_per_second": 10.0,
        "rlcore_tokens_total": 80.0,
        "rlcore_checkpoint_eval_score": 0.25,
    }


def test_files_of_the_run_are_read_at_each_scrape(make: Made, tmp_path: Path) -> None:
    make()
    assert scrape(tmp_path) == {}
    status = StatusFile(tmp_path / "status.json")
    status.begins(3, 8)
    status.phase("train")
    failures = tmp_path / "failures.jsonl"
    line = json.dumps({"step": 1, "entries": [ENTRY]}) + "\n"
    failures.write_text(line + line + line[:20])
    for rank in ("rank-0", "rank-1"):
        (tmp_path / "logs" / rank).mkdir(parents=True)
        (tmp_path / "logs" / rank / "vllm-0.prom").write_text(ENGINE)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/rank-1.json").write_text(json.dumps({"rank": 1, "host": "there", "memory_bytes": {"reserved": 5}}))
    found = scrape(tmp_path)
    assert (found["rlcore_steps_done"], found["rlcore_steps_planned"], found["rlcore_phase{phase=train}"]) == (3, 8, 1)
    assert found["rlcore_episodes_total{kind=grader,outcome=masked}"] == 6
    assert found["vllm:num_requests_running{engine=rank-0/vllm-0,model_name=m}"] == 7
    assert found["vllm:generation_tokens_total{engine=rank-1/vllm-0,model_name=m}"] == 128
    assert found["rlcore_rank_memory_bytes{kind=reserved,node=there,rank=1}"] == 5
    failures.write_text(line + line + line)
    assert scrape(tmp_path)["rlcore_episodes_total{kind=grader,outcome=masked}"] == 9
    failures.write_text(line)  # as a run writes it that goes on from a checkpoint
    assert scrape(tmp_path)["rlcore_episodes_total{kind=grader,outcome=masked}"] == 3


def test_scrapes_at_once_count_each_line_once(make: Made, tmp_path: Path) -> None:
    make()
    (tmp_path / "failures.jsonl").write_text(json.dumps({"step": 1, "entries": [ENTRY]}) + "\n")
    threads = [threading.Thread(target=scrape, args=(tmp_path,)) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert scrape(tmp_path)["rlcore_episodes_total{kind=grader,outcome=masked}"] == 3


def test_a_taken_port_is_named_and_0_takes_another(make: Made, tmp_path: Path) -> None:
    make()
    taken = int(address(tmp_path).rpartition(":")[2])
    with pytest.raises(ConfigError) as raised:
        make(port=taken)
    (problem,) = raised.value.problems
    assert problem.path == "sinks.prometheus.port"
    assert str(taken) in problem.found
    make(port=0)
    assert address(tmp_path) != f"127.0.0.1:{taken}"


def test_nothing_listens_once_the_run_has_ended(make: Made, tmp_path: Path) -> None:
    sink = make()
    url = f"http://{address(tmp_path)}/metrics"
    sink.close({"steps": 1})
    assert not (tmp_path / "prometheus.json").exists()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)
