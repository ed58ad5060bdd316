"""The recipe of docs/rewards.md is accepted, and its functions return what the text says."""

import json

from click.testing import CliRunner
from markdown_blocks import ROOT, blocks, write_files

from rlcore.cli.main import cli
from rlcore_rewards.call_forms import Sample
from rlcore_rewards.reward_function import RewardFunction
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


def test_functions_of_other_libraries_reward_a_sample(tmp_path):
    write_files(DOCUMENT, tmp_path)
    sample = Sample(prompt="p", completion="x" * 17, row={"data_source": "own", "answer": "x" * 17})
    found = [RewardFunction.load(f"{tmp_path}/trl_rewards.py:{name}") for name in ("reward_len", "compute_score")]
    assert [function.form.name for function in found] == ["TRL", "verl"]
    assert [function.say(sample).figures for function in found] == [{"reward": -3.0}, {"reward": 1.0, "length": 17.0}]
