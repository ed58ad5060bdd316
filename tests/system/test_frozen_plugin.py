"""A package that was built for version 2.0 of the interface, and is never built again: it installs, is found and trains.

Its sources are in the wheel. Where this test fails, the interface has broken its promise (docs/versions.md): the wheel stays.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore_torchkit.testing.models import make_model

WHEEL = Path(__file__).parent / "plugins" / "acme_frozen-2.0-py3-none-any.whl"
ROLES = ("trainer", "algorithm", "environment")
RECIPE = """
[run]
name = "frozen"
num_steps = 2

[model]
path = "model"

[trainer]
name = "frozen"

[generator]
name = "transformers"

[algorithm]
name = "frozen"

[environment]
name = "frozen"

[data.evaluation]

[rollout]
max_prompt_tokens = 8
max_response_tokens = 8

[training]
prompts_per_step = 4

[optimizer]
learning_rate = 1e-3
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The wheel, installed into a folder of its own that is on the path."""
    site = tmp_path / "site"
    offline = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *offline, str(WHEEL)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.usefixtures("installed")
def test_it_is_found_and_trains(tmp_path):
    listing = json.loads(CliRunner().invoke(cli, ["plugins", "--json"]).stdout)
    found = {row["role"]: row for row in listing["plugins"] if row["distribution"] == "acme-frozen"}
    assert set(found) == set(ROLES)
    assert all(row["usable"] and row["spi"] == [2, 0] for row in found.values()), found

    make_model(tmp_path / "model")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    result = CliRunner().invoke(cli, ["train", str(recipe), f"run.directory={tmp_path}"])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (tmp_path / "frozen" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    assert len(steps) == 2
    assert all(record["grad_norm"] > 0 for record in steps)
