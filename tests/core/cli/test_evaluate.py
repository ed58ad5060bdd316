"""`rlcore eval`: figures as text and as JSON."""

import json
from pathlib import Path

import pytest

from rlcore.run.plan import channel

from .conftest import prepared


def test_eval_prints_figures(invoke, calls, tmp_path: Path) -> None:
    result = invoke("eval", "r.toml", "--checkpoint", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == ["eval/pass@1                0.6250", "eval/response_length_mean  7.5000"]
    assert calls.evaluated == [{"checkpoint": tmp_path}]


def test_eval_of_another_model_as_json(invoke, calls) -> None:
    result = invoke("eval", "r.toml", "run.seed=3", "--model", "12", "--json")
    assert json.loads(result.stdout) == {"eval/pass@1": 0.625, "eval/response_length_mean": 7.5}
    assert calls.prepared == [(Path("r.toml"), ["run.seed=3", 'model.path="12"'])]
    assert calls.evaluated == [{"checkpoint": None}]


def test_eval_of_several_samples(invoke, calls) -> None:
    result = invoke("eval", "r.toml", "--samples", "16", "--k", "4", "--k", "16", "--k", "4", "evaluation.temperature=0.8")
    assert result.exit_code == 0, result.output
    (_, overrides), *_ = calls.prepared
    assert overrides[0] == "evaluation.temperature=0.8"
    assert overrides[-2:] == ["evaluation.samples_per_prompt=16", "evaluation.pass_at_k=[4, 16]"]


@pytest.mark.parametrize("options", [("--k", "4"), ("--samples", "4"), ()])
def test_eval_of_several_samples_is_refused_where_nothing_is_sampled(invoke, calls, monkeypatch, options) -> None:
    plan = prepared()
    plan.measures_examples = True
    monkeypatch.setattr("rlcore.run.plan.prepare.prepare", lambda *_, **__: plan)
    result = invoke("eval", "r.toml", *options)
    assert (result.exit_code, len(calls.evaluated)) == ((2, 0) if options else (0, 1))
    assert ("algorithm 'alg' measures the held-out rows itself" in " ".join(result.stderr.split())) == bool(options)


def test_eval_of_a_checkpoint_and_a_model_is_refused(invoke, calls) -> None:
    result = invoke("eval", "r.toml", "--model", "a", "--checkpoint", "b")
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr
    assert not calls.prepared


def test_eval_of_a_model_by_a_generator_that_has_another_is_refused(invoke, calls, monkeypatch) -> None:
    monkeypatch.setattr(channel, "has_other_model", lambda entry: entry.name == "gen")
    result = invoke("eval", "r.toml", "--model", "a")
    assert result.exit_code == 2
    assert "a would not be measured" in " ".join(result.stderr.split())
    assert not calls.evaluated
    assert invoke("eval", "r.toml").exit_code == 0
