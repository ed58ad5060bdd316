"""`rlcore train`: what it passes on."""

import tomllib
from pathlib import Path


def test_train_passes_on_what_it_was_given(invoke, calls, tmp_path: Path) -> None:
    directory = tmp_path / 'a "b"'
    result = invoke("train", "r.toml", "run.seed=3", "--resume", "--directory", str(directory), "--name", "007", "a.b=x")
    assert result.exit_code == 0, result.output
    ((path, overrides),) = calls.prepared
    assert path == Path("r.toml")
    assert overrides[:2] == ["run.seed=3", "a.b=x"]
    assert tomllib.loads("\n".join(overrides[2:])) == {"run": {"directory": str(directory), "name": "007"}}
    assert calls.trained == [{"resume": True, "allow_changes": False}]


def test_train_starts_anew_by_default(invoke, calls) -> None:
    assert invoke("train", "r.toml").exit_code == 0
    assert calls.prepared == [(Path("r.toml"), [])]
    assert calls.trained == [{"resume": False, "allow_changes": False}]


def test_changes_are_allowed_where_a_run_is_resumed_alone(invoke, calls) -> None:
    assert invoke("train", "r.toml", "--resume", "--allow-changes").exit_code == 0
    assert calls.trained == [{"resume": True, "allow_changes": True}]
    refused = invoke("train", "r.toml", "--allow-changes")
    assert refused.exit_code == 2
    assert "--allow-changes is for --resume" in refused.stderr
    assert len(calls.trained) == 1


def test_a_schedule_is_replayed_where_one_is_named(invoke, calls) -> None:
    assert invoke("train", "r.toml", "--replay-schedule", "s.jsonl").exit_code == 0
    assert calls.replayed == [Path("s.jsonl")]
