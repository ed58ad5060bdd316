"""What counts as figures, and what is said where there are none."""

import json
import os
from pathlib import Path

import pytest

from rlcore_serve.checkpoint_evaluation.result import NoFiguresError, read_figures


def figures(folder: Path, printed: str, file: str | None = None, key: str | None = None) -> dict[str, float]:
    (folder / "stdout.log").write_text(printed)
    return read_figures(folder / "stdout.log", folder / "output", file, key)


def test_the_last_line_that_is_an_object_counts(tmp_path: Path) -> None:
    printed = '{"accuracy": 0.25}\n  {"accuracy": 0.5, "solved": 3}\n[1, 2]\n{broken\nGood bye\n\n'
    assert figures(tmp_path, printed) == {"checkpoint_eval/accuracy": 0.5, "checkpoint_eval/solved": 3.0}


def test_nested_names_are_joined_and_what_is_no_number_is_passed_over(tmp_path: Path) -> None:
    printed = json.dumps({"a": {"b,none": 1, "alias": "x", "ok": True, "n": None}, "scores": [{"value": 0.5}, 2], "": 1})
    assert figures(tmp_path, printed) == {
        "checkpoint_eval/a/b,none": 1.0,
        "checkpoint_eval/scores/0/value": 0.5,
        "checkpoint_eval/scores/1": 2.0,
    }


def test_the_newest_file_of_a_pattern_counts_below_a_key(tmp_path: Path) -> None:
    folder = tmp_path / "output" / "policy"
    folder.mkdir(parents=True)
    for seconds, value in ((2000, 0.75), (1000, 0.25)):
        file = folder / f"results_{seconds}.json"
        file.write_text(json.dumps({"results": {"task": {"acc": value}}, "config": {"seed": 7}}))
        os.utime(file, (seconds, seconds))
    found = figures(tmp_path, "", "**/results_*.json", "results.task")
    assert found == {"checkpoint_eval/acc": 0.75}


def test_a_key_may_lead_through_a_list(tmp_path: Path) -> None:
    printed = json.dumps({"scores": [{"metrics": {"accuracy": 0.5}}, {"metrics": {"accuracy": 1}}]})
    assert figures(tmp_path, printed, key="scores.1.metrics") == {"checkpoint_eval/accuracy": 1.0}


@pytest.mark.parametrize(
    ("printed", "key", "message"),
    [
        ("Traceback\nKeyError: 'x'\n", None, r"no line that is a JSON object; the last is \"KeyError: 'x'\""),
        ("", None, "the last is ''"),
        ('{"name": "x"}', None, "what it printed holds no number; expected names and numbers"),
        ('{"results": {}}', "results", "holds no number below 'results'"),
        ('{"a": 1, "b": 2}', "results", "has no key 'results'; at 'results' there are a, b"),
        ('{"a": 1}', "a.b", "has no key 'a.b'; at 'b' there are a int"),
    ],
)
def test_what_holds_no_figures_is_named(tmp_path: Path, printed: str, key: str | None, message: str) -> None:
    with pytest.raises(NoFiguresError, match=message):
        figures(tmp_path, printed, key=key)


def test_a_file_that_is_missing_or_no_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoFiguresError, match=r"r\.json.*output"):
        figures(tmp_path, "", "r.json")
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "r.json").write_text("[1]")
    with pytest.raises(NoFiguresError, match=r"r\.json is no JSON object"):
        figures(tmp_path, "", "r.json")
