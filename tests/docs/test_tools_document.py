"""The recipe of docs/tools.md trains with its server, and the page's reward function returns what the text says."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from markdown_blocks import ROOT, blocks, write_files

from rlcore.cli.main import cli
from rlcore_rewards.call_forms import Sample
from rlcore_rewards.reward_function import RewardFunction
from rlcore_torchkit.testing.models import make_model

DOCUMENT = ROOT / "docs" / "tools.md"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_the_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(DOCUMENT, tmp_path)
    [row] = [block.text for block in blocks(DOCUMENT) if block.language == "json"]
    (tmp_path / "questions.jsonl").write_text(row)
    model = make_model(tmp_path / "model", max_length=1024)
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    checked = CliRunner().invoke(cli, ["check", "tools.toml"])
    assert checked.exit_code == 0, checked.output
    trained = CliRunner().invoke(cli, ["train", "tools.toml"])
    assert trained.exit_code == 0, trained.output
    lines = [json.loads(line) for line in (tmp_path / "runs/tools/metrics.jsonl").read_text().splitlines()]
    assert [line["environment/calls_per_episode"] >= 0 for line in lines if "environment/calls_per_episode" in line]


def test_the_reward_needs_a_call_and_the_answer(tmp_path: Path) -> None:
    write_files(DOCUMENT, tmp_path)
    score = RewardFunction.load(f"{tmp_path}/score.py:score")
    good, bad = {"is_error": False}, {"is_error": True}
    for completion, calls, reward in (("2 ", [good], 1.0), ("2", [bad], 0.0), ("2", [], 0.0), ("3", [good], 0.0)):
        sample = Sample(prompt=[], completion=completion, row={"answer": "2", "tool_calls": calls})
        assert score.say(sample).figures == {"reward": reward}
