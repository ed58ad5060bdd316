"""docs/run-directory.md against a run: every file and metric is explained, and its example reads them."""

import json
import re

import pyarrow.parquet as parquet
import pytest
from click.testing import CliRunner
from markdown_blocks import ROOT, blocks

from rlcore.cli.main import cli
from rlcore_torchkit.testing.models import make_model

DOCUMENT = ROOT / "docs" / "run-directory.md"
RECIPE = """
[run]
name = "run"
num_steps = 2
[model]
path = "model"
[algorithm]
name = "grpo"
[algorithm.grpo]
kl_coefficient = 0.01
previous_logprobs = "trainer"
[environment]
name = "arithmetic"
[data.evaluation]
[rollout]
max_prompt_tokens = 8
max_response_tokens = 4
[training]
prompts_per_step = 4
minibatches_per_step = 2
[evaluation]
max_prompts = 8
[logging]
rollouts_every_n_steps = 2
[checkpoint]
export = "hf"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of `grpo` in it, and one of `sft`."""
    directory = tmp_path_factory.mktemp("run-directory")
    make_model(directory / "model")
    (directory / "recipe.toml").write_text(RECIPE)
    (directory / "pairs.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 8)
    sft = ["run.name=sft", "algorithm.name=sft", "data.train.source=jsonl", f"data.train.path={directory / 'pairs.jsonl'}"]
    for overrides in ([], [*sft, 'sinks.names=["curve", "tensorboard"]']):
        arguments = ["train", str(directory / "recipe.toml"), f"run.directory={directory}", *overrides]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
    return directory


@pytest.fixture(scope="module")
def explained():
    """Names in the first column of the document's tables."""
    rows = re.findall(r"^\| (`.*?) \|", DOCUMENT.read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize("name", ["run", "sft"])
def test_every_metric_is_explained(folder, explained, name):
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    metrics = {metric for record in records for metric in record} - {"step"}
    unexplained = {metric for metric in metrics - explained if not metric.startswith("environment/")}
    assert not unexplained, f"{DOCUMENT.name} does not explain {sorted(unexplained)}"


def test_every_key_of_the_summary_is_explained(folder, explained):
    assert not json.loads((folder / "run" / "summary.json").read_text()).keys() - explained


def test_every_file_is_explained(folder):
    text = DOCUMENT.read_text()
    for path in ((folder / name) for name in ("run", "sft")):
        missing = [entry.name for entry in path.iterdir() if f"`{entry.name}" not in text]
        assert not missing


def test_every_column_of_the_rollouts_is_explained(folder, explained):
    columns = set(parquet.read_schema(folder / "run" / "rollouts" / "step-000002.parquet").names)
    assert columns <= explained


def test_the_example_reads_a_run(folder, monkeypatch, capsys):
    (example,) = (block.text for block in blocks(DOCUMENT) if block.language == "python")
    monkeypatch.chdir(folder / "run")
    exec(compile(example, DOCUMENT.name, "exec"), {})
    assert capsys.readouterr().out.startswith("[(0, 0.0), (2, 0.0)]")
