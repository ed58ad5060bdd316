"""Metric sinks: a third party's, found by its entry point, and what happens where one fails."""

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from attrs import evolve

import rlcore.run.report.sinks
from rlcore.registry.discovery import Registry, discover
from rlcore.registry.plugin_errors import owner_of
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.spi import ConfigError, PluginError, Sink, hookimpl
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.trainer import FakeTrainer
from rlcore.time_limit import LOAD_VARIABLE

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]

MODULE = """
import json
from attrs import frozen
from rlcore.spi import Provider

@frozen(kw_only=True)
class LinesConfig:
    prefix: str = ""
    fails_in: str = ""
    recipes: str = ""

class Lines:
    def __init__(self, context, config):
        self.name, self.options, self.file = context.run_name, config, context.run_directory / "lines.jsonl"
        self.fail("building")
        if config.recipes:
            found = (context.run_directory / "recipe.toml").read_text(), context.recipe
            with open(config.recipes, "a") as file:
                file.write(json.dumps(found) + chr(10))

    def fail(self, where):
        if self.options.fails_in == where:
            raise ConnectionError(f"no tracker while {where}")

    def write(self, **line):
        with self.file.open("a") as file:
            file.write(self.options.prefix + json.dumps(line) + chr(10))

    def log(self, step, metrics):
        self.fail(f"step {step}")
        self.write(step=step, **metrics)
        metrics.clear()

    def close(self, summary):
        self.fail("closing")
        self.write(run=self.name, summary=summary)

class Shows(Lines):
    def log_samples(self, step, samples):
        self.fail(f"samples {step}")
        self.write(step=step, samples=[sample.response for sample in samples], rewards=[sample.reward for sample in samples])

class Silent:
    def __init__(self, context, config): pass

FIELDS = dict(name="lines", spi=(2, 0), config=LinesConfig, backend="acme_sinks:Lines")
LINES = Provider(**FIELDS)
SHOWS = Provider(**{**FIELDS, "name": "shows", "backend": "acme_sinks:Shows"})
SILENT = Provider(**{**FIELDS, "name": "silent", "backend": "acme_sinks:Silent"})
AWAY = Provider(**{**FIELDS, "name": "away", "unavailable": lambda: "no tracker is installed: pip install tracker"})
"""


class Notes(Progress):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The fakes, with the sinks of a distribution that an installer wrote."""
    site = tmp_path / "site"
    information = site / "acme_sinks-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-sinks\nVersion: 1.0\n")
    points = "".join(f"{name} = acme_sinks:{name.upper()}\n" for name in ("lines", "shows", "silent", "away"))
    (information / "entry_points.txt").write_text(f"[rlcore.sinks]\n{points}")
    (site / "acme_sinks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "acme_sinks", raising=False)
    importlib.invalidate_caches()
    fakes = tuple(entry for entry in fake_registry().entries if entry.role != "sink")
    return evolve(fake_registry(), entries=(*fakes, *discover().of("sink")))


NAMED = ('sinks.names=["lines"]', "run.num_steps=3")


def test_a_sink_gets_the_figures_of_steps_its_options_and_the_run_directory(
    run: Run, tmp_path: Path, installed: Registry
) -> None:
    summary = run(*NAMED, "sinks.lines.prefix=#", registry=installed)
    directory = tmp_path / "runs" / "run"
    lines = (directory / "lines.jsonl").read_text().splitlines()
    assert all(line.startswith("#") for line in lines)
    *steps, last = (json.loads(line[1:]) for line in lines)
    assert steps == read_metrics(directory, timed=True)
    assert last == {"run": "run", "summary": summary}
    versions = json.loads((directory / "environment.json").read_text())["distributions"]
    assert versions["acme-sinks"] == "1.0"


@pytest.mark.parametrize(("where", "written", "goes_on"), [("step 2", [0, 1], True), ("closing", [0, 1, 2, 3], False)])
def test_a_sink_that_fails_is_noted_once_and_the_run_ends_well(
    run: Run, tmp_path: Path, installed: Registry, where: str, written: list[int], goes_on: bool
) -> None:
    progress = Notes()
    summary = run(*NAMED, f"sinks.lines.fails_in={where}", registry=installed, progress=progress)
    assert summary["steps"] == 3
    (note,) = progress.notes
    assert note.startswith("sink 'lines' (acme-sinks 1.0)")
    assert f"ConnectionError: no tracker while {where}" in note
    assert ("the run goes on" in note) == goes_on
    directory = tmp_path / "runs" / "run"
    assert [json.loads(line)["step"] for line in (directory / "lines.jsonl").read_text().splitlines()] == written
    assert [record["step"] for record in read_metrics(directory)] == [0, 1, 2, 3]


def test_a_sink_that_takes_samples_gets_some_before_the_figures(run: Run, tmp_path: Path, installed: Registry) -> None:
    names = 'sinks.names=["shows"]', "run.num_steps=4", "logging.samples_every_n_steps=2", "logging.samples=3"
    run(*names, registry=installed)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "run" / "lines.jsonl").read_text().splitlines()]
    assert [(line.get("step"), "samples" in line) for line in lines] == [
        *[(0, False), (1, False), (2, True), (2, False), (3, False), (4, True), (4, False), (None, False)]
    ]
    assert all(len(line["samples"]) == len(line["rewards"]) == 3 for line in lines if "samples" in line)


def test_figures_of_evaluations_go_to_the_sinks_that_take_them() -> None:
    class Plain:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise AssertionError("only a step's own figures")

    class Measured(Plain):
        def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 4:
                raise ConnectionError("no tracker")
            got.append((step, metrics))

    got: list[tuple[int, Mapping[str, float]]] = []
    progress = Notes()
    sinks = Sinks(progress)
    sinks.add("sink 'plain'", cast("Sink", Plain()))
    sinks.add("sink 'measured'", cast("Sink", Measured()))
    assert sinks.without_evaluations == ["sink 'plain'"]
    for step in (2, 4, 6):
        sinks.log_evaluation(step, {"checkpoint_eval/a": 0.5})
    assert got == [(2, {"checkpoint_eval/a": 0.5})]
    assert progress.notes == ["sink 'measured' failed and gets nothing more; the run goes on: ConnectionError: no tracker"]


def test_a_sink_that_fails_at_samples_is_noted_once(run: Run, installed: Registry) -> None:
    progress = Notes()
    options = "logging.samples_every_n_steps=1", "sinks.shows.fails_in=samples 1"
    assert run('sinks.names=["shows"]', *options, registry=installed, progress=progress)["steps"] == 6
    (note,) = progress.notes
    assert "no tracker while samples 1" in note


def test_a_sink_is_built_where_the_run_is_described_and_knows_the_recipe_of_a_resumed_one(
    run: Run, tmp_path: Path, installed: Registry
) -> None:
    seen, written = tmp_path / "recipes.jsonl", tmp_path / "runs" / "run" / "recipe.toml"
    run('sinks.names=["lines"]', f"sinks.lines.recipes={seen}", "run.num_steps=2", registry=installed)
    first = written.read_text()
    run('sinks.names=["lines"]', f"sinks.lines.recipes={seen}", "run.num_steps=3", resume=True, registry=installed)
    found = [json.loads(line) for line in seen.read_text().splitlines()]
    assert found == [[first, first], [first, written.read_text().removeprefix("# From step 3 on.\n")]]


def test_a_sink_that_knows_the_remedy_says_it_alone() -> None:
    class Plots:
        def close(self, summary: Mapping[str, object] | None) -> None:
            raise PluginError("pip install plots")

    progress = Notes()
    sinks = Sinks(progress)
    sinks.add("sink 'plots'", cast("Sink", Plots()))
    sinks.close()
    assert progress.notes == ["sink 'plots' failed when the run ended: pip install plots"]


class Wordless(Exception):
    def __str__(self) -> str:
        raise KeyError("host")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Wordless(), "Wordless: <its text raises KeyError>"),
        (ValueError("a\nb\nc"), "ValueError: a"),
        (PluginError("a\nb"), "a"),
        (OSError(), "OSError"),
    ],
)
def test_whatever_a_sink_raises_is_noted_on_one_line(error: Exception, cause: str) -> None:
    class Fails:
        def close(self, summary: Mapping[str, object] | None) -> None:
            raise error

    progress = Notes()
    sinks = Sinks(progress)
    sinks.add("sink 'fails'", cast("Sink", Fails()))
    sinks.close()
    assert progress.notes == [f"sink 'fails' failed when the run ended: {cause}"]


def test_what_a_sink_does_to_its_summary_reaches_no_other() -> None:
    seen: list[dict[str, object]] = []

    class Clears:
        def close(self, summary: dict[str, object]) -> None:
            seen.append(dict(summary))
            summary.clear()

    sinks = Sinks(Notes())
    sinks.summary = summary = {"steps": 3}
    for label in ("one", "two"):
        sinks.add(label, cast("Sink", Clears()))
    sinks.close()
    assert seen == [{"steps": 3}] * 2
    assert summary == {"steps": 3}


def refuse(self, request):
    raise ValueError("no more")


def test_a_run_that_fails_closes_its_sinks_without_a_summary(
    run: Run, tmp_path: Path, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTrainer, "train_step", hookimpl(refuse))
    with pytest.raises(ValueError, match="no more"):
        run(*NAMED, registry=installed)
    lines = (tmp_path / "runs" / "run" / "lines.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"run": "run", "summary": None}


def test_a_sink_that_cannot_be_built_is_an_error_before_the_run(run: Run, tmp_path: Path, installed: Registry) -> None:
    with pytest.raises(ConnectionError) as caught:
        run(*NAMED, "sinks.lines.fails_in=building", registry=installed)
    assert owner_of(caught.value) == "sink 'lines' (acme-sinks 1.0)"
    with pytest.raises(PluginError, match=r"Silent\.log: missing"):
        run('sinks.names=["silent"]', registry=installed)
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_sinks_that_were_built_are_closed_where_a_later_one_cannot_be(run: Run, tmp_path: Path, installed: Registry) -> None:
    with pytest.raises(PluginError):
        run('sinks.names=["lines", "silent"]', registry=installed)
    assert json.loads((tmp_path / "runs" / "run" / "lines.jsonl").read_text()) == {"run": "run", "summary": None}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("away", "no tracker is installed: pip install tracker"),
        ("liens", "'liens' is not installed. Did you mean .lines"),
    ],
)
def test_a_sink_that_cannot_be_had_is_found_before_the_run(
    prepared: Callable[..., Any], installed: Registry, name: str, said: str
) -> None:
    with pytest.raises(PluginError, match=said):
        prepared(f'sinks.names=["{name}"]', registry=installed)


def test_all_plugins_that_cannot_be_had_are_told_at_once(prepared: Callable[..., Any], installed: Registry) -> None:
    names = [f"{role}.name=no-{role}" for role in ("trainer", "generator", "algorithm", "environment")]
    with pytest.raises(PluginError) as raised:
        prepared('sinks.names=["away", "liens"]', 'observers.names=["watch"]', *names, registry=installed)
    for said in (
        "pip install tracker",
        "sink 'liens' is not installed",
        "observer 'watch' is not installed",
        *(f"{role} 'no-{role}' is not installed" for role in ("trainer", "generator", "algorithm", "environment")),
    ):
        assert said in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "path", "found", "remedy"),
    [
        (['sinks.names=["lines", "lines"]'], "sinks.names", '["lines", "lines"]', ""),
        (["logging.lines=true"], "logging.lines", "an unknown key", 'Did you mean "lines" in sinks.names?'),
        (["sinks.lines.prefx=x"], "sinks.lines.prefx", "an unknown key", "Did you mean sinks.lines.prefix?"),
        (
            ['sinks.names=["lines"]', 'plugins.disable=["sink:lines"]'],
            "plugins.disable",
            '"sink:lines", which sinks.names asks for',
            "",
        ),
    ],
)
def test_a_wrong_choice_of_sinks_is_found_before_the_run(
    prepared: Callable[..., Any], installed: Registry, overrides: list[str], path: str, found: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(*overrides, registry=installed)
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == (path, found)
    assert problem.remedy == remedy


@pytest.mark.parametrize("method", ["log", "close"])
def test_a_sink_that_does_not_return_is_called_no_more(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            calls.append("log")
            if method == "log":
                time.sleep(60.0)

        def close(self, summary: Mapping[str, object] | None) -> None:
            calls.append("close")
            time.sleep(60.0)

    class Notes(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    calls: list[str] = []
    notes: list[str] = []
    monkeypatch.setenv(LOAD_VARIABLE, "1")
    monkeypatch.setattr(rlcore.run.report.sinks, "LIMIT_TIMES", 1.0)
    sinks = Sinks(Notes())
    sinks.add("sink 'x'", Waiting())
    sinks.log(1, {})
    sinks.close()
    assert calls == ["log", "close"][: 1 if method == "log" else 2]
    assert [one.partition(" took longer than 1 s")[0] for one in notes] == [
        f"sink 'x' {'failed and gets nothing more; the run goes on' if method == 'log' else 'failed when the run ended'}"
        ": a call of sink 'x'"
    ]
