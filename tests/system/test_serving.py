"""`rlcore serve` with the generator transformers: a model, what comes of a run's checkpoint, and a judge of answers."""

import asyncio
import os
import re
import signal
import socket
import string
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from rlcore.cli.main import cli
from rlcore.spi import EnvironmentContext, FinishReason, PluginError, Turn
from rlcore_rewards.judge import JudgeBackend
from rlcore_rewards.judge_config import JudgeConfig
from rlcore_torchkit.testing.models import make_model

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
[trainer]
name = "fsdp2"
[generator]
name = "transformers"
[sinks]
names = []
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def served(port: int, arguments: list[str], talk: Callable[[openai.OpenAI], None]) -> Result:
    """Serve until a client has talked, which then interrupts the command as Ctrl-C would."""
    ended = threading.Event()

    def talk_and_end() -> None:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        try:
            while not ended.is_set():
                try:
                    client.models.list()
                    break
                except openai.APIConnectionError:
                    time.sleep(0.05)
            talk(client)
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=talk_and_end)
    thread.start()
    result = CliRunner().invoke(cli, ["serve", *arguments, "--port", str(port)])
    ended.set()
    thread.join()
    return result


def test_a_model_is_served_until_ctrl_c(tmp_path: Path, port: int) -> None:
    model = make_model(tmp_path / "little")
    answers: list[Any] = []

    def talk(client: openai.OpenAI) -> None:
        answers.append(client.models.list().data[0].id)
        options: dict[str, Any] = {"model": "little", "max_tokens": 5, "seed": 3, "logprobs": True}
        options["messages"] = [{"role": "user", "content": "hello"}]
        answers.extend(client.chat.completions.create(**options, temperature=0) for _ in range(2))
        answers.append(client.chat.completions.create(**options, stop=["a"], n=3))

    result = served(port, [str(model), "--generator", "transformers", "run.device=cpu"], talk)
    assert result.exit_code == 0, result.output
    name, first, again, several = answers
    assert name == "little"
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.usage.completion_tokens == len(first.choices[0].logprobs.content) <= 5
    assert len(several.choices) == 3


def test_a_runs_checkpoint_becomes_a_model_that_is_served(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_model(tmp_path / "model", max_length=1024)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model))
    trained = CliRunner().invoke(cli, ["train", "recipe.toml"])
    assert trained.exit_code == 0, trained.output
    answers: list[Any] = []

    def talk(client: openai.OpenAI) -> None:
        options: dict[str, Any] = {"model": "run", "prompt": "1+1=", "max_tokens": 3, "temperature": 0, "logprobs": 1}
        answers.append(client.completions.create(**options).choices[0].logprobs)

    result = served(port, ["runs/run"], talk)
    assert result.exit_code == 0, result.output
    assert "exporting runs/run/checkpoints/step-000001 to runs/run/exports/step-000001" in result.stderr
    exports = tmp_path / "runs/run/exports/step-000001"
    exported, base = (load_file(path / "model.safetensors") for path in (exports, model))
    assert exported.keys() == base.keys()
    assert any(not torch.equal(exported[name], base[name]) for name in base)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(exports)("1+1=", add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        scores = AutoModelForCausalLM.from_pretrained(exports, dtype=torch.float32)(ids).logits[0, -1].log_softmax(-1)
    assert answers[0].token_logprobs[0] == pytest.approx(float(scores.max()), abs=1e-4)


def test_a_served_model_judges(tmp_path: Path, port: int) -> None:
    """The score is the last digit that another client reads in its answer."""
    model = make_model(tmp_path / "little", max_length=256, alphabet=f"{string.digits}user: aitn\n")
    (tmp_path / "judge.txt").write_text("{row[rule]}: {prompt}{completion}")
    options: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}/v1", "prompt_file": str(tmp_path / "judge.txt")}
    options |= {"model": "little", "max_tokens": 8, "score_pattern": r"(\d)", "score_range": (0, 9)}
    results: list[Any] = []

    async def judged(config: JudgeConfig) -> Any:
        judge = JudgeBackend(EnvironmentContext(seed=0), config)
        try:
            reset = await judge.reset({"prompt": "12", "rule": "rate"}, 0)
            tokens = np.zeros(1, np.int32)
            return await judge.step(reset.state, Turn(text="34", tokens=tokens, finish_reason=FinishReason.STOP))
        finally:
            judge.close()

    def talk(client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="little", temperature=0, max_tokens=8, messages=[{"role": "user", "content": "rate: 1234"}]
        )
        results.append(answer.choices[0].message.content)
        for config in (JudgeConfig(**options), JudgeConfig(**{**options, "model": "other"})):
            try:
                results.append(asyncio.run(judged(config)))
            except Exception as error:
                results.append(error)

    result = served(port, [str(model), "--generator", "transformers", "run.device=cpu"], talk)
    assert result.exit_code == 0, result.output
    text, answer, refused = results
    score = float(re.findall(r"\d", text)[-1])
    assert (answer.metrics, answer.done) == ({"score": score}, True)
    assert answer.reward == pytest.approx(score / 9)
    assert isinstance(refused, PluginError)
    assert "this server has 'little'" in str(refused)
