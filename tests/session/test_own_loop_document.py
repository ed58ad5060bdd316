"""The programs of docs/own-loop.md, and of the package's README.md, run as they stand and do what the pages say."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from rlcore_torchkit.testing.models import make_model

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "docs" / "own-loop.md", ROOT / "plugins" / "session" / "README.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The programs as files, and the model that most begin with."""
    folder = tmp_path_factory.mktemp("own-loop")
    for block in (block for page in DOCUMENTS for block in page.read_text().split("```python\n")[1:]):
        text = block.partition("```")[0]
        (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    make_model(folder / "model", alphabet="0123456789+=")
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return lambda name: runpy.run_path(str(folder / name))


def test_grpo_learns_in_forty_lines(run, folder):
    lines = [line for line in (folder / "grpo.py").read_text().splitlines()[1:] if line]
    assert len(lines) <= 40
    history = run("grpo.py")["history"]
    assert history[0] < 0.2
    assert history[-1] > 0.6
    best = run("best_of_n.py")
    assert best["best"] > best["first"]
    assert best["best"] > 0.8


def test_self_distillation_lowers_the_divergence(run):
    found = run("distill.py")["divergences"]
    first, last = sum(found[:3]) / 3, sum(found[-5:]) / 5
    assert first > 0.05
    assert last < 0.5 * first


def test_evolution_finds_better_prefixes(run):
    best = run("evolve.py")["best"]
    assert (np.diff(best) > -1e-4).all()  # the same prefix in another batch is rounded otherwise
    assert best[-1] > best[0] + 0.1


def test_function_of_pairs_prefers_the_first(run):
    margins = run("pairs.py")["margins"]
    assert margins == sorted(margins)
    assert margins[-1] > margins[0] + 1


def test_recorded_step_is_repeated_and_a_fault_is_named(run, capsys):
    run("recorded.py")
    assert capsys.readouterr().out.strip().splitlines()[-2:] == ["None", "update 1: log-probabilities"]


def test_coroutines(run, capsys):
    run("tasks.py")
    assert capsys.readouterr().out.count(",") == 4


def test_adapters_learn_by_turns(run, folder):
    ran = run("adapters.py")
    for name, losses in ran["losses"].items():
        assert ran["together"][name].loss < 0.5 * losses[0]
        assert losses[-1] < 0.5 * losses[0]
        assert (folder / "adapters" / name / "adapter_model.safetensors").is_file()


def test_readme_samples(run):
    assert len(run("samples.py")["samples"]) == 8
