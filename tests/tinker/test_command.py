"""`rlcore serve --train`."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tinker_server import RANK

from rlcore_serve.command import serve_command

RECIPE = """
[model]
path = "{model}"

[trainer]
name = "fsdp2"

[generator]
name = "transformers"

[lora]
rank = {rank}

[rollout]
max_prompt_tokens = 16
max_response_tokens = 16

[run]
directory = "{runs}"
name = "served"
"""


def _recipe(model: Path, folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(model=model, rank=RANK, runs=folder / "runs"))
    return path


def test_the_command_makes_a_key_and_the_client_trains_by_it(model: Path, tmp_path: Path) -> None:
    tinker = pytest.importorskip("tinker", reason="needs the client: pip install tinker")
    code = "from rlcore.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--train", str(_recipe(model, tmp_path)), "--port", str(_free_port())]
    process = subprocess.Popen(
        [*command, "--name", "org/model"], stderr=subprocess.PIPE, text=True, env={**os.environ, "RLCORE_API_KEY": ""}
    )
    assert process.stderr is not None
    told: dict[str, str] = {}
    for line in process.stderr:
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").strip().partition("=")
            told[name] = value
        if "TINKER_API_KEY" in told:
            break
    assert told["TINKER_API_KEY"].startswith("tml-")
    service = tinker.ServiceClient(base_url=told["TINKER_BASE_URL"], api_key=told["TINKER_API_KEY"])
    training = service.create_lora_training_client(base_model="org/model", rank=RANK).result()
    assert training.get_info().model_data.tokenizer_id == str(model)
    path = training.save_state("first").result().path
    assert list((tmp_path / "runs" / "served" / "tinker" / "checkpoints").glob("*/weights/first/checkpoint.json"))
    assert path.startswith("tinker://")
    service.close("success").result()
    refused = str(_refused([str(tmp_path / "recipe.toml"), "--train", "--port", str(_free_port())]))
    assert "run.name: found one whose folder" in refused
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert {path.name for path in (tmp_path / "runs" / "served" / "tinker").iterdir()} == {"checkpoints", "lock"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", "step-1"], "--checkpoint with --train"),
        (["--generator", "vllm", "--max-length", "9"], "--generator, --max-length with --train"),
    ],
)
def test_options_of_other_servers_are_refused(model: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    asked = [str(_recipe(model, tmp_path)), "--train", "--port", str(_free_port()), *arguments]
    assert words in str(_refused(asked))


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "rlcore-tinker")
    refused = str(_refused([str(_recipe(model, tmp_path)), "--train", "--port", str(_free_port())]))
    assert "pip install rlcore-tinker" in refused


def _refused(arguments: list[str]) -> Any:
    result = CliRunner().invoke(serve_command, arguments)
    assert result.exit_code != 0
    return result.exception


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
