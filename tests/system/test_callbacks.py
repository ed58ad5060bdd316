"""Classes of the user's whose methods follow a run."""

import json

import pytest

from .system_support import Workplace, expect_failure  # type: ignore[import-not-found]

SOURCE = """
import json
from pathlib import Path

LOG = Path(__file__).with_name("calls.jsonl")


class Watch:
    def __init__(self):
        self.calls = []

    def _note(self, *call):
        with LOG.open("a") as file:
            file.write(json.dumps(call) + "\\n")

    def on_step_end(self, step, metrics):
        self._note("step", step, metrics)

    def on_evaluate(self, step, metrics):
        self._note("evaluate", step, metrics)

    def on_save(self, step, checkpoint):
        self._note("save", step, str(checkpoint), (checkpoint / "loop.json").is_file())

    def on_sample(self, step, samples):
        self._note("sample", step, [[one.prompt, one.response, one.reward] for one in samples])


class Other:
    def on_step_end(self, step, metrics):
        with LOG.open("a") as file:
            file.write(json.dumps(["other", step]) + "\\n")


class Failing:
    def on_save(self, step, checkpoint):
        raise ValueError("no space")


class Misspelt:
    def on_steps_end(self, step, metrics): ...


class Narrow:
    def __init__(self, recipe): ...
    async def on_save(self, step, checkpoint): ...
    def on_step_end(self, step): ...


class Deaf: ...


def function(): ...
"""
OPTIONS = ("run.num_steps=2", "checkpoint.every_n_steps=2", "evaluation.every_n_steps=0", "evaluation.at_end=true")


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    (workplace.folder / "callbacks.py").write_text(SOURCE)
    return workplace


def test_methods_get_what_the_run_directory_has(place: Workplace) -> None:
    classes = 'callbacks.path=["callbacks.py:Watch","callbacks.py:Other"]'
    run = place.train("grpo.toml", *OPTIONS, classes, "callbacks.num_samples=3", "evaluation.at_start=true")
    calls = [json.loads(line) for line in (place.folder / "calls.jsonl").read_text().splitlines()]
    order = [(name, step) for name, step, *_ in calls]
    steps = [[("sample", step), *([("evaluate", 2)] if step == 2 else []), ("step", step), ("other", step)] for step in (1, 2)]
    assert order == [("evaluate", 0), *steps[0], *steps[1], ("save", 2)]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line.pop("step"): line for line in lines}
    for name, step, what, *more in (call for call in calls if call[0] != "other"):
        if name == "step":
            assert what.items() <= found[step].items()
            assert "reward_mean" in what
        elif name == "evaluate":
            assert what == {key: value for key, value in found[step].items() if key.startswith("eval/")}
            assert what
        elif name == "save":
            assert (place.folder / what, more) == (run / "checkpoints" / "step-000002", [True])
        else:
            assert len(what) == 3
            assert all(prompt.endswith("=") and isinstance(reward, float) for prompt, _, reward in what)


def test_an_error_of_a_method_ends_the_run_and_names_its_line(place: Workplace) -> None:
    line = SOURCE.splitlines().index('        raise ValueError("no space")') + 1
    result = place.rlcore("train", "grpo.toml", *OPTIONS, "callbacks.path=callbacks.py:Failing")
    assert result.exit_code != 0
    assert all(part in result.stderr for part in ("callbacks.py:Failing", "on_save", f"callbacks.py:{line}", "no space"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Misspelt", ("on_steps_end", "Did you mean on_step_end?")),
        ("Narrow", ("without arguments", "async def", "on_step_end cannot")),
        ("Deaf", ("without a method",)),
        ("function", ("no class",)),
        ("Gone", ("Gone",)),
    ],
)
def test_a_class_that_cannot_follow_is_refused_before_the_run(place: Workplace, name: str, parts: tuple[str, ...]) -> None:
    expect_failure(place.rlcore("check", "grpo.toml", f"callbacks.path=callbacks.py:{name}"), 2, "callbacks.path", *parts)
