"""Planted faults of many kinds: the component that brings the difference is named, in few replays."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from bisect_faults import FAULTS, Sections
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import rlcore
from rlcore.cli.main import cli
from rlcore.spi import ConfigError
from rlcore_bundles.bisect_command import lines_of
from rlcore_bundles.bisecting import bisect
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.group_search import smallest_set
from rlcore_bundles.storage import read_bundle
from rlcore_bundles.swaps import MOST_REPLAYS
from rlcore_torchkit.layers import packed_attention

STEP = 2
OTHER_PACKAGE = """
from rlcore_torchkit.layers import packed_attention

own = packed_attention.padded_attention
packed_attention.padded_attention = lambda *arguments: 1.02 * own(*arguments)
"""
"""Stands for another version of the package that computes attention."""


@pytest.fixture(scope="module")
def run_of(recipe_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """Trains, and returns the bundle of a step. The good run of equal sections is trained once."""
    kept: dict[str, Bundle] = {}

    def make(folder: Path, *layers: Sections) -> Bundle:
        recipe = recipe_of(tmp_path_factory.mktemp("runs"))
        for layer in layers:
            _merge(recipe, layer, str(folder))
        key = repr({name: section for name, section in recipe.items() if name != "run"})
        if len(layers) == 1 and key in kept:
            return kept[key]
        run = rlcore.train(recipe, progress="silent")
        bundle = read_bundle(run.path / "bundles" / f"step-{STEP:06d}")
        return kept.setdefault(key, bundle) if len(layers) == 1 else bundle

    return make


def _merge(target: dict[str, Any], layer: Any, folder: str) -> None:
    for name, value in layer.items():
        if isinstance(value, dict):
            target[name] = dict(target.get(name, {}))
            _merge(target[name], value, folder)
        else:
            target[name] = value.replace("{folder}", folder) if isinstance(value, str) else value


@pytest.mark.parametrize("name", FAULTS)
def test_the_component_at_fault_is_named(
    run_of: Callable[..., Bundle], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    for file, text in fault.files.items():
        (tmp_path / file).write_text(text)
    good = run_of(tmp_path, fault.both)
    fault.plant(monkeypatch, tmp_path)
    bad = run_of(tmp_path, fault.both, fault.bad)
    if not fault.stays:
        monkeypatch.undo()
    found = bisect(good, bad)
    assert tuple(sorted(found.components)) == fault.expected, found
    assert found.quantity in ([fault.quantity] if isinstance(fault.quantity, str) else fault.quantity), found
    assert found.is_complete
    assert len(found.replays) <= MOST_REPLAYS


def test_another_version_of_a_package_is_found_in_its_environment(
    run_of: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = run_of(tmp_path, {})
    own = packed_attention.padded_attention
    monkeypatch.setattr(packed_attention, "padded_attention", lambda *arguments: 1.02 * own(*arguments))
    bad = run_of(tmp_path, {}, {})
    monkeypatch.undo()
    packages = tmp_path / "packages"
    (packages / "pluggy-1.99.0.dist-info").mkdir(parents=True)
    (packages / "pluggy-1.99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: pluggy\nVersion: 1.99.0\n")
    (packages / "sitecustomize.py").write_text(OTHER_PACKAGE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = bisect(good, bad, [python])
    assert (list(found.components), found.kind) == (["pluggy"], "package"), found
    assert found.lines[0].startswith("pluggy 1.99.0 there; here ")
    assert len(found.replays) <= MOST_REPLAYS
    assert bisect(good, bad).components == ["trainer"]


@pytest.mark.wide
def test_another_layout_is_named(run_of: Callable[..., Bundle], tmp_path: Path) -> None:
    good = run_of(tmp_path, {})
    layout = {"cluster": {"gpus_per_node": 2}, "trainer": {"name": "fsdp2", "fsdp2": {"tensor_parallel": 2}}}
    found = bisect(good, run_of(tmp_path, {}, layout))
    assert (list(found.components), found.is_rounding) == (["layout"], True), found


def test_another_version_of_a_package_is_a_hint(run_of: Callable[..., Bundle], tmp_path: Path) -> None:
    bundle = run_of(tmp_path, {})
    distributions: Any = bundle.environment["distributions"]
    environment = {**bundle.environment, "distributions": {**distributions, "numpy": "1.0"}}
    first = evolve(bundle.updates[0], grad_norm=bundle.updates[0].grad_norm * 1.1)
    found = bisect(bundle, evolve(bundle, environment=environment, updates=[first, *bundle.updates[1:]]))
    assert (list(found.components), found.quantity) == (["trainer"], "update 1: gradient norm")
    assert found.lines[0].startswith("numpy 1.0 in the bad run; here ")


def test_a_search_without_a_replay_left_says_so(run_of: Callable[..., Bundle], tmp_path: Path) -> None:
    fault = FAULTS["a KL weight and a loss denominator"]
    good, bad = run_of(tmp_path, fault.both), run_of(tmp_path, fault.both, fault.bad)
    found = bisect(good, bad, most=5)
    assert (found.is_complete, len(found.replays)) == (False, 5)
    assert {*fault.expected} < {*found.components} == {"KL weight", "loss denominator", "clip bounds"}
    assert next(lines_of(found)).startswith("No replay was left to choose: one or several of ")


def test_an_interpreter_without_the_package_is_refused(run_of: Callable[..., Bundle], tmp_path: Path) -> None:
    bundle = run_of(tmp_path, {})
    rewards = bundle.sampled.rewards + 1
    wrong = evolve(bundle, sampled=evolve(bundle.sampled, rewards=rewards))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError) as error:
        bisect(bundle, wrong, [python])
    assert "which ended with 'no such module'" in str(error.value)


def test_equal_steps_and_other_inputs(run_of: Callable[..., Bundle], tmp_path: Path) -> None:
    bundle = run_of(tmp_path, {})
    assert bisect(bundle, bundle).kind == "none"
    other = bisect(bundle, run_of(tmp_path, {}, {"run": {"seed": 7}}))
    assert list(other.components) == ["seed"], other
    rows = [{**row, "note": 1} for row in bundle.sampled.rows]
    found = bisect(bundle, evolve(bundle, sampled=evolve(bundle.sampled, rows=rows)))
    assert (list(found.components), found.kind) == (["data"], "inputs")
    hashed, bare = evolve(bundle, prompts="hashed"), evolve(bundle, weights="none")
    with pytest.raises(ConfigError) as error:
        bisect(hashed, bare)
    assert [problem.path for problem in error.value.problems] == ["good", "bad"]


def test_the_command_takes_runs_and_says_what_to_change(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    runs = [
        rlcore.train(recipe_of(tmp_path, name, logging={"bundles_every_n_steps": 0}, **sections), progress="silent").path
        for name, sections in {"good": {}, "bad": {"optimizer": {"learning_rate": 6e-3}}}.items()
    ]
    ran = CliRunner().invoke(cli, ["bisect", *map(str, runs)])
    assert ran.exit_code == 1, ran.output
    assert "The learning rate brings the difference." in ran.output
    assert "optimizer.learning_rate = 0.006; in the good one 0.005" in ran.output
    ran = CliRunner().invoke(cli, ["bisect", str(runs[0]), str(runs[0]), "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["kind"] == "none"
    assert CliRunner().invoke(cli, ["diff", *map(str, runs)]).exit_code == 1


def test_a_bundle_and_a_run_are_refused(finished: Path, recorded: Bundle) -> None:
    ran = CliRunner().invoke(cli, ["bisect", str(recorded.directory), str(finished)])
    assert ran.exit_code not in (0, 1)
    assert "which is none; expected two bundles or two runs" in ran.output


@given(
    names=st.lists(st.sampled_from("abcdefghijkl"), min_size=1, max_size=12, unique=True),
    guilty=st.sets(st.integers(0, 11), min_size=1, max_size=3),
)
def test_the_smallest_set_is_found_in_few_trials(names: list[str], guilty: set[int]) -> None:
    wanted = {names[number % len(names)] for number in guilty}
    asked: list[frozenset[str]] = []

    def brings(some: frozenset[str]) -> bool:
        asked.append(some)
        return wanted <= some

    assert set(smallest_set(names, brings)) == wanted
    assert len(asked) == len(set(asked))
    if len(wanted) == 1:
        assert len(asked) <= 5
