"""`rlcore serve` with vLLM, by OpenAI's own client: one engine in a process of its own, whose requests join each other."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from attrs import frozen
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore_torchkit.testing.models import make_model

LIMIT = 512
KEY = "secret"
PROMPT = [5, 6, 7, 8]
NUM_LONG = 64
"""Samples of the long request: one may end early, the longest does not."""
START_TIMEOUT_S = 900.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head size that vLLM has on CPU."""
    folder = tmp_path_factory.mktemp("served") / "model"
    return make_model(folder, "qwen3", hidden_size=64, num_heads=2, num_kv_heads=1, max_length=LIMIT)


@frozen(kw_only=True)
class Served:
    """A server and its client."""

    port: int
    client: openai.OpenAI

    def complete(self, **options: Any) -> Any:
        """Complete the prompt, by 16 tokens unless told otherwise."""
        return self.client.completions.create(**{"model": "policy", "prompt": PROMPT, "max_tokens": 16, **options})


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The command, in a process of its own, until it gets Ctrl-C."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "rlcore", "serve", str(model), "--name", "policy", "--generator", "vllm"]
    command += ["run.device=cpu", "generator.vllm.cpu_kv_cache_gib=0.1", "--max-length", str(LIMIT)]
    with socket.socket() as held, log.open("wb") as output:
        # The server may take the port in spite of this socket, which keeps it from everyone else until then.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RLCORE_API_KEY": KEY}
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
        try:
            end = time.monotonic() + START_TIMEOUT_S
            while "answers on" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield Served(port=port, client=client)
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 0, log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_the_models_own_weights_answer(served: Served, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    (listed,) = served.client.models.list()
    assert (listed.id, listed.max_model_len) == ("policy", LIMIT)
    choice = served.complete(logprobs=1, seed=3, temperature=1.0).choices[0]
    # The tokens are told as text, of which an unlikely token may have none of its own: greedy ones are recognised.
    greedy = served.complete(logprobs=1, temperature=0).choices[0]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids, found = list(PROMPT), []
    with torch.no_grad():
        for _ in greedy.logprobs.token_logprobs:
            scores = torch.log_softmax(policy(torch.tensor([ids])).logits[0, -1].double(), dim=-1)
            found.append(float(scores.max()))
            ids.append(int(scores.argmax()))
    np.testing.assert_allclose(greedy.logprobs.token_logprobs, found, atol=1e-3)
    assert min(choice.logprobs.token_logprobs) < min(found)


def test_what_clients_of_openai_ask_for(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "1+1"}]
    chat = served.client.chat.completions
    seeded = [chat.create(model="policy", messages=messages, max_tokens=8, seed=5, n=2) for _ in range(2)]
    contents = [[choice.message.content for choice in answer.choices] for answer in seeded]
    assert contents[0] == contents[1]
    assert contents[0][0] != contents[0][1]
    streamed = chat.create(model="policy", messages=messages, max_tokens=8, seed=5, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == contents[0][0]
    stop = next(character for character in text if character.strip())
    (stopped,) = chat.create(model="policy", messages=messages, max_tokens=8, seed=5, stop=[stop]).choices
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == text.partition(stop)[0]
    (short,) = chat.create(model="policy", messages=messages, max_tokens=1, temperature=0.5, top_p=0.9).choices
    assert short.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"prompt": [5] * LIMIT}, str(LIMIT)),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(served: Served, options: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        served.complete(**options)


def test_only_its_key_is_let_in(served: Served) -> None:
    for key in ("other", "Bearer", KEY + "x"):
        with pytest.raises(openai.AuthenticationError, match="another API key"):
            served.client.with_options(api_key=key).models.list()


def test_requests_join_what_is_generated(served: Served) -> None:
    """Short ones are answered one after another while a long one is: the first may have come before it, the second has not."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(served.complete, max_tokens=LIMIT - len(PROMPT), n=NUM_LONG, seed=1, temperature=1.0)
        num_short = 0
        while not long.done():
            served.complete(max_tokens=1)
            num_short += not long.done()
        assert len(long.result().choices) == NUM_LONG
    assert num_short >= 2


def test_its_port_is_taken_for_another(served: Served, model: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", str(model), "--port", str(served.port)])
    assert result.exit_code == 2
    assert f"--port: found {served.port} on 127.0.0.1: address already in use" in result.stderr


def test_what_cannot_be_served_is_said_before_vllm_is_imported(model: Path) -> None:
    arguments = ["serve", str(model), "--generator", "vllm", "--port", "1999", "run.device=cpu"]
    result = CliRunner().invoke(cli, [*arguments, "generator.vllm.cpu_kv_cache_gib=0.0001"])
    assert result.exit_code == 2
    assert "generator.vllm.cpu_kv_cache_gib: found 0.0001" in result.stderr
    assert f"one sequence of {LIMIT} tokens" in result.stderr
    assert "--max-length" in result.stderr
    result = CliRunner().invoke(cli, [*arguments, "--max-length", "20000"])
    assert result.exit_code == 5
    assert f"max_position_embeddings = {LIMIT}" in result.stderr
