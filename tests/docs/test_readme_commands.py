"""README's commands on a recipe, one after the other, as a reader runs them."""

import shlex

import pytest
from click.testing import CliRunner
from markdown_blocks import ROOT, blocks

from rlcore.cli.main import cli
from rlcore.testing.fakes import FakeTokenizer, fake_registry

RECIPE = """
[run]
num_steps = 100
[model]
path = "none"
[algorithm]
name = "fake"
[environment]
name = "fake"
[data.evaluation]
source = "environment"
[training]
prompts_per_step = 16
[sinks]
names = []
[checkpoint]
every_n_steps = 100
"""
"""A recipe of as many steps as the block's checkpoint has, which the fakes make in a second."""


@pytest.fixture
def commands() -> list[str]:
    """The block's commands."""
    (block,) = (block for block in blocks(ROOT / "README.md") if "$ rlcore train recipe.toml --resume" in block.text)
    return [line.removeprefix("$ ") for line in block.text.splitlines()]


def test_the_commands_on_a_recipe_run_one_after_the_other(commands: list[str], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.setattr("rlcore.run.plan.sections.discover", lambda _: fake_registry())
    monkeypatch.setattr("rlcore_text.loading.load_tokenizer", lambda *_: FakeTokenizer())
    assert len(commands) == 7
    for line in commands:
        result = CliRunner().invoke(cli, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step-000100").is_dir()
    assert "<html" in (tmp_path / "report.html").read_text()
