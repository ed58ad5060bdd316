"""The dashboard for Grafana: its panels ask for metrics that a real run exports, and it has the fields of Grafana."""

import json
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from rlcore.cli.main import cli
from rlcore_torchkit.testing.models import make_model

promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
pytest.importorskip("vllm", reason="vllm is not installed")

RECIPE = """
[run]
num_steps = 2
[model]
path = "{model}"
[algorithm]
name = "grpo"
[environment]
name = "arithmetic"
[environment.arithmetic]
max_operand = 9
num_train = 60
num_evaluation = 4
partial_credit = 0.5
[data.evaluation]
[generator]
name = "vllm"
[generator.vllm]
cpu_kv_cache_gib = 0.1
metrics = true
[async]
max_staleness = 1
[rollout]
samples_per_prompt = 8
max_prompt_tokens = 8
max_response_tokens = 4
[training]
prompts_per_step = 4
[checkpoint]
at_end = false
[observers]
names = ["rank_status"]
[sinks]
names = ["prometheus"]
[sinks.prometheus]
port = 0
[callbacks]
path = "{folder}/scrape.py:Scrape"
"""
SCRAPE = '''
import json, time, urllib.request

class Scrape:
    """Keeps what /metrics shows after a step."""

    def on_step_end(self, step, metrics):
        time.sleep(5)  # engines and ranks write every two seconds
        (target,) = json.load(open("runs/run/prometheus.json"))
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics") as answer:
            open("scrape.txt", "wb").write(answer.read())
'''
INTERVAL = "5m"
"""Grafana's $__rate_interval and $run are filled in before Prometheus gets an expression."""
PANEL = {"id", "type", "title", "datasource", "gridPos", "targets", "fieldConfig", "options"}
DASHBOARD = {"uid", "title", "schemaVersion", "version", "panels", "templating", "time", "refresh", "timezone", "annotations"}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """The names of samples of a run with a vLLM engine that generates ahead."""
    folder = tmp_path_factory.mktemp("run")
    model = make_model(folder / "model", alphabet="0123456789+-*=", max_length=64, hidden_size=64, num_heads=2)
    (folder / "scrape.py").write_text(SCRAPE)
    (folder / "recipe.toml").write_text(RECIPE.format(model=model, folder=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(cli, ["train", "recipe.toml"])
    assert result.exit_code == 0, result.output + result.stderr
    families = text_string_to_metric_families((folder / "scrape.txt").read_text())
    yield {sample.name for family in families for sample in family.samples}
    assert not (folder / "runs/run/prometheus.json").exists()


@pytest.fixture
def dashboard(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the output of `python -m rlcore_prometheus`."""
    runpy.run_module("rlcore_prometheus", run_name="__main__")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def selected(expression: Any) -> Iterator[Any]:
    """The vector selectors of a parsed expression."""
    if isinstance(expression, promql.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        part = getattr(expression, name, None)
        if part is not None and not isinstance(part, str):
            yield from selected(part)
    for part in getattr(expression, "args", None) or ():
        yield from selected(part)


def test_every_panel_asks_for_metrics_of_a_run(dashboard: dict[str, Any], scraped: set[str]) -> None:
    targets = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(targets) > 20
    for title, text in targets:
        parsed = promql.parse(text.replace("$__rate_interval", INTERVAL).replace("$run", ".*"))
        names = {selector.name for selector in selected(parsed)}
        assert names, title
        assert names <= scraped, title


def test_the_run_that_is_chosen_has_a_metric(dashboard: dict[str, Any], scraped: set[str]) -> None:
    (run,) = [variable for variable in dashboard["templating"]["list"] if variable["name"] == "run"]
    assert run["query"]["query"] == "label_values(rlcore_steps_done, run)"
    assert "rlcore_steps_done" in scraped


def test_it_has_the_fields_of_grafana(dashboard: dict[str, Any]) -> None:
    assert dashboard.keys() >= DASHBOARD
    panels = dashboard["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel.keys() >= PANEL
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & places, panel["title"]
        places |= cells
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + n) for n in range(len(panel["targets"]))]
        assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()
