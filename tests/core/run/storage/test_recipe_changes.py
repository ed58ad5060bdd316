"""A run that is resumed with another recipe says what changed, keeps what it ran with, and stays the run that it was."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.run.storage.recipe_changes import recipe_changes
from rlcore.run.storage.resuming import find_checkpoint
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.spi import CheckpointError

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


class Notes(Progress):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


def test_each_value_that_differs_is_a_change_and_what_is_unset_is_none() -> None:
    before = '# From step 3 on.\n# environment = none\n[run]\nname = "a"\nseed = 1\n[rollout]\nstop_strings = ["x"]\n'
    after = '[run]\nname = "b"\nseed = 2\n[rollout]\nstop_strings = ["x"]\n[environment]\nname = "math"\n'
    assert list(map(str, recipe_changes(before, after))) == ["run.seed 1 -> 2", "[environment] is new"]
    assert list(map(str, recipe_changes(after, before))) == ["run.seed 2 -> 1", "[environment] is gone"]


def test_a_section_that_is_new_or_gone_is_one_change() -> None:
    common = "[generator]\nname = 'one'\n[model.chat_template_kwargs]\n"
    before = f"[trainer.one]\na = 1\nb = 2\n[trainer.one.c]\nd = 3\n{common}[generator.one]\n"
    after = f"[trainer.two]\na = 1\n{common}thinks = true\n"
    changes = recipe_changes(before, after)
    assert list(map(str, changes)) == [
        "[trainer.two] is new",
        "[trainer.one] is gone",
        "model.chat_template_kwargs.thinks none -> True",
    ]
    assert [change.makes_another_run for change in changes] == [False, False, True]
    (change,) = recipe_changes("", "[environment]\nname = 'math'\n")
    assert change.makes_another_run, "it has a key that does"


def test_a_key_that_a_data_set_did_not_have_yet_is_no_change_where_it_has_its_default() -> None:
    before, after = "[data.train]\nsource = 'jsonl'\n", "[data.train]\nsource = 'jsonl'\nmessages_field = 'messages'\n"
    assert recipe_changes(before, after) == recipe_changes(after, before) == []
    (change,) = recipe_changes(before, after.replace("'messages'", "'chat'"))
    assert (change.key, change.makes_another_run) == ("data.train.messages_field", True)


def test_long_texts_and_numbers_of_another_kind_differ() -> None:
    long = "x" * 80
    assert len(recipe_changes(f'a = "{long}1"\nb = true\nc = 1', f'a = "{long}2"\nb = 1\nc = 1.0')) == 3


def test_an_unchanged_recipe_is_resumed_without_a_word_about_it(run: Run, directory: Path) -> None:
    run()
    before, notes = (directory / "recipe.toml").read_text(), Notes()
    run(resume=True, progress=notes)
    assert [text.partition(":")[0] for text in notes.texts] == ["run.num_steps = 6, and 6 steps are done"]
    assert (directory / "recipe.toml").read_text() == before
    assert list(directory.glob("recipe-*.toml")) == []


def test_what_changed_is_said_and_every_recipe_is_kept(run: Run, directory: Path) -> None:
    run("run.num_steps=2")
    first, notes = (directory / "recipe.toml").read_text(), Notes()
    run("run.num_steps=4", "optimizer.learning_rate=0.05", resume=True, progress=notes)
    second = (directory / "recipe.toml").read_text()
    assert notes.texts == ["the recipe has changed: run.num_steps 2 -> 4; optimizer.learning_rate 0.1 -> 0.05"]
    run("run.num_steps=5", "optimizer.learning_rate=0.05", resume=True)
    assert (directory / "recipe-001.toml").read_text() == first
    assert (directory / "recipe-002.toml").read_text() == second
    assert second.startswith("# From step 3 on.\n")
    newest = (directory / "recipe.toml").read_text()
    assert newest.startswith("# From step 5 on.\n")
    assert tomllib.loads(newest)["run"]["num_steps"] == 5
    assert not (directory / "recipe-003.toml").exists()


def test_a_recipe_is_kept_where_an_earlier_one_was_removed(run: Run, directory: Path) -> None:
    for number in (1, 2, 3):
        run(f"run.num_steps={number}", resume=number > 1)
    second = (directory / "recipe-002.toml").read_text()
    (directory / "recipe-001.toml").unlink()
    run("run.num_steps=4", resume=True)
    assert (directory / "recipe-002.toml").read_text() == second
    assert (directory / "recipe-003.toml").is_file()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("run.seed=7", "run.seed 0 -> 7"),
        ("training.prompts_per_step=4", "training.prompts_per_step 8 -> 4"),
        ("data.train.limit=3", "data.train.limit none -> 3"),
        ("data.train.shuffle=false", "data.train.shuffle True -> False"),
        ('model.chat_template="{{ messages }}"', "model.chat_template none -> '{{ messages }}'"),
    ],
)
def test_what_makes_another_run_is_refused_and_changes_nothing(run: Run, directory: Path, change: str, said: str) -> None:
    run("run.num_steps=2")
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(CheckpointError) as caught:
        run("run.num_steps=4", change, resume=True)
    assert f"\n  - {said}\n" in str(caught.value)
    assert "num_steps" not in str(caught.value)
    assert "--allow-changes" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    notes = Notes()
    run("run.num_steps=4", change, resume=True, allow_changes=True, progress=notes)
    assert said in notes.texts[0]
    assert [record["step"] for record in read_metrics(directory)] == [0, 1, 2, 3, 4]


def test_another_model_may_be_allowed(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"name": name}))
    run("run.num_steps=2", f"model.path={tmp_path / 'one'}")
    (tmp_path / "one").rename(tmp_path / "moved")
    run("run.num_steps=3", f"model.path={tmp_path / 'moved'}", resume=True)
    notes = Notes()
    run("run.num_steps=4", f"model.path={tmp_path / 'two'}", resume=True, allow_changes=True, progress=notes)
    assert "of another model" in notes.texts[0]


def test_a_run_that_made_nothing_takes_any_recipe(run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no room"):
        patched.setattr("rlcore.run.training.loop_of_run.Loop", refuse)
        run()
    assert tomllib.loads((directory / "recipe.toml").read_text())["run"]["seed"] == 0
    run("run.seed=7", resume=True)
    assert tomllib.loads((directory / "recipe.toml").read_text())["run"]["seed"] == 7
    assert [record["step"] for record in read_metrics(directory)] == [0, 1, 2, 3, 4, 5, 6]


def test_a_line_of_metrics_without_a_checkpoint_is_a_run(run: Run, directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 0}\n')
    (directory / "recipe.toml").write_text("[run]\nseed = 0\n")
    with pytest.raises(CheckpointError, match=r"run\.seed 0 -> 7"):
        run("run.seed=7", resume=True)


def test_a_fault_of_the_new_recipe_is_not_blamed_on_the_old(
    run: Run, prepared: Callable[..., RunPlan], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("run.num_steps=2")
    plan, notes = prepared("run.num_steps=2"), Notes()

    def refuse(*arguments: object) -> str:
        raise ValueError("trainer.odd.sizes: found None")

    monkeypatch.setattr("rlcore.run.plan.run_plan.dump_toml", refuse)
    with pytest.raises(ValueError, match=r"trainer\.odd\.sizes"):
        find_checkpoint(plan, RunDirectory(path=directory), notes.note, resume=True, allow_changes=False)
    assert notes.texts == []


def test_a_damaged_recipe_is_said_and_kept(run: Run, directory: Path) -> None:
    run("run.num_steps=2")
    (directory / "recipe.toml").write_text("[run\n")
    notes = Notes()
    run("run.num_steps=4", resume=True, progress=notes)
    assert "recipe.toml cannot be read, so that nothing is known of changes" in notes.texts[0]
    assert (directory / "recipe-001.toml").read_text() == "[run\n"


def test_a_recipe_that_is_gone_is_said(run: Run, directory: Path) -> None:
    """Whether the run has changed cannot be known then."""
    run("run.num_steps=2")
    (directory / "recipe.toml").unlink()
    notes = Notes()
    run("run.num_steps=4", resume=True, progress=notes)
    assert "recipe.toml is gone, so that nothing is known of changes" in notes.texts[0]
    assert (directory / "recipe.toml").exists()
