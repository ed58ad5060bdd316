"""`rlcore serve` with a generator that has no server of its own."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.testing.models import make_model


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_model_is_served_until_ctrl_c(tmp_path: Path, port: int) -> None:
    model = make_model(tmp_path / "little")
    answers: list[Any] = []
    ended = threading.Event()

    def talk() -> None:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        try:
            while not answers and not ended.is_set():
                try:
                    answers.append(client.models.list().data[0].id)
                except openai.APIConnectionError:
                    time.sleep(0.05)
            options: dict[str, Any] = {"model": "little", "messages": messages, "max_tokens": 5, "seed": 3, "logprobs": True}
            answers.extend(client.chat.completions.create(**options, temperature=0) for _ in range(2))
            answers.append(client.chat.completions.create(**options, stop=["a"], n=3))
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    client = threading.Thread(target=talk)
    client.start()
    arguments = [str(model), "--generator", "transformers", "--port", str(port), "trainer.name=fsdp2", "run.device=cpu"]
    result = CliRunner().invoke(cli, ["serve", *arguments])
    ended.set()
    client.join()
    assert result.exit_code == 0, result.output
    name, first, again, several = answers
    assert name == "little"
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.usage.completion_tokens == len(first.choices[0].logprobs.content) <= 5
    assert len(several.choices) == 3
