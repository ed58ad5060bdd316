"""The recipe of docs/rewards.md is accepted, and its functions return what the text says."""

import json
import runpy

from click.testing import CliRunner
from markdown_blocks import ROOT, blocks, write_files

from rlcore.cli.main import cli
from rlcore_torchkit.testing.models import make_model

DOCUMENT = ROOT / "docs" / "rewards.md"


def test_the_recipe_is_accepted(tmp_path):
    write_files(DOCUMENT, tmp_path)
    [row] = [block.text for block in blocks(DOCUMENT) if block.language == "json"]
    (tmp_path / "sums.jsonl").write_text(row)
    make_model(tmp_path / "model", max_length=2048)
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "rewarded.toml")])
    assert result.exit_code == 0, result.output
    assert f"| {json.loads(row)['prompt']}" in result.output


def test_a_function_of_trl_is_wrapped(tmp_path):
    write_files(DOCUMENT, tmp_path)
    score = runpy.run_path(str(tmp_path / "trl_rewards.py"))["score"]
    assert score(completion="x" * 17, prompt="p", row={}) == -3
