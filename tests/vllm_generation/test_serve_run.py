"""`rlcore serve RUN` with the installed plugins: a checkpoint of a real run, exported and handed to the server."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from rlcore.cli.main import cli
from rlcore.spi import ServeRequest
from rlcore.testing.models import make_model
from rlcore_vllm.config import VllmConfig

RECIPE = """
[run]
num_steps = 1
device = "cpu"
[model]
path = "{model}"
[algorithm]
name = "sft"
[environment]
name = "arithmetic"
[evaluation]
at_start = false
at_end = false
[training]
prompts_per_step = 2
[optimizer]
learning_rate = 1e-2
[generator]
name = "transformers"
[generator.vllm]
max_num_seqs = 7
[sinks]
names = []
"""


def test_a_runs_checkpoint_becomes_a_model_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[ServeRequest, VllmConfig]] = []
    monkeypatch.setattr("rlcore_vllm.serve.serve", lambda request, config: requests.append((request, config)))
    monkeypatch.chdir(tmp_path)
    model = make_model(tmp_path / "model", "qwen3", hidden_size=64, num_heads=2, num_kv_heads=1, max_length=1024)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model))
    trained = CliRunner().invoke(cli, ["train", "recipe.toml"])
    assert trained.exit_code == 0, trained.output
    result = CliRunner().invoke(cli, ["serve", "runs/run", "--port", "1999", "generator.vllm.prefix_caching=false"])
    assert result.exit_code == 0, result.output
    assert "exporting runs/run/checkpoints/step-000001 to runs/run/exports/step-000001" in result.stderr

    ((request, config),) = requests
    assert (request.name, request.device, request.port, request.model.dtype) == ("run", "cpu", 1999, "float32")
    assert (config.max_num_seqs, config.prefix_caching) == (7, False)
    exported, base = (load_file(Path(path) / "model.safetensors") for path in (request.model.path, model))
    assert exported.keys() == base.keys()
    assert any(not torch.equal(exported[name], base[name]) for name in base)
    assert (Path(request.model.path) / "tokenizer.json").is_file()
