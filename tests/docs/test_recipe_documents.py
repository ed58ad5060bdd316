"""Every recipe of the pages of recipes is accepted, and every command of docs/quickstart.md ends well."""

import runpy
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from markdown_blocks import ROOT, blocks, write_files

from rlcore.cli.main import cli
from rlcore.run.plan.prepare import prepare
from rlcore_torchkit.testing.models import make_model

RECIPES = [ROOT / "docs" / f"{name}.md" for name in ("recipes", "fine-tuning", "lora")]
QUICKSTART = ROOT / "docs" / "quickstart.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The recipes of the pages, the checkout's beside them, and a model."""
    directory = tmp_path_factory.mktemp("recipes")
    for page in RECIPES:
        write_files(page, directory)
    (directory / "recipes").symlink_to(ROOT / "recipes")
    make_model(directory / "model", max_length=2048)
    return directory


def fragments():
    return [block.text for page in RECIPES for block in blocks(page) if block.language == "toml" and not block.file_name]


def accepted(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    return prepare(path).recipe


@pytest.mark.parametrize("name", [block.file_name for page in RECIPES for block in blocks(page) if block.file_name])
def test_whole_recipes_are_accepted(folder, monkeypatch, name):
    accepted(folder / name, monkeypatch)


def test_later_layers_win(folder, monkeypatch):
    recipe = accepted(folder / "four-updates.toml", monkeypatch)
    assert (recipe.run.name, recipe.training.minibatches_per_step, recipe.training.prompts_per_step) == (
        "sums-four-updates",
        4,
        16,
    )
    hub = accepted(folder / "gsm8k-hub.toml", monkeypatch)
    assert (hub.data.train.path, hub.data.train.prompt_field) == ("openai/gsm8k", "question")


@pytest.mark.parametrize("fragment", fragments(), ids=lambda text: text.replace("\n", " ")[:40])
def test_fragments_fit_into_a_recipe(folder, monkeypatch, fragment):
    base = "recipes/gsm8k-grpo.toml" if "environment.math" in fragment else "small.toml"
    (folder / "fragment.toml").write_text(f'extends = "{base}"\n{fragment}')
    accepted(folder / "fragment.toml", monkeypatch)


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    """A folder with the files of docs/quickstart.md, as the working directory."""
    write_files(QUICKSTART, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(document):
    """Commands of the console blocks, but for those that set up."""
    texts = [block.text for block in blocks(document) if block.language == "console"]
    found = [line.removeprefix("$ ") for text in texts for line in text.splitlines()]
    return [shlex.split(line) for line in found if line.startswith(("python ", "rlcore "))]


def test_the_quickstart_works_line_by_line(quickstart):
    commands = lines(QUICKSTART)
    assert len(commands) == 8
    for program, *arguments in commands:
        if program == "python":
            runpy.run_path(arguments[0])
            continue
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, f"rlcore {' '.join(arguments)}:\n{result.output}"
    assert (quickstart / "runs/first/checkpoints/step-000030").is_dir()
    assert Path("runs/second/summary.json").is_file()
