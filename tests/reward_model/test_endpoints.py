"""A reward model behind servers: values, servers that share the answers, and servers that are none."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from openai_servers import serving
from transformers import AutoTokenizer

from rlcore.spi import EnvironmentContext, FinishReason, PluginError, RewardError, Turn
from rlcore_openai import endpoint_pool
from rlcore_reward_model.config import RewardModelConfig
from rlcore_reward_model.environment import RewardModelEnvironment
from rlcore_reward_model.scorer import Conversation, Failure, Scoring, encode, score
from rlcore_torchkit.testing.models import make_model


class Stub:
    """A server of a reward model whose value is the sum of the tokens, over 1,000."""

    def __init__(self, status: int = 200, models: tuple[str, ...] = ("m",), **changes: Any) -> None:
        self.status, self.models, self.changes = status, models, changes
        self.bodies: list[dict[str, Any]] = []

    def reply(self, body: dict[str, Any]) -> Any:
        one = {"probs": [sum(body["input"]) / 1000], **self.changes}
        return {"data": [one], "usage": {"prompt_tokens": self.changes.get("num_tokens", len(body["input"]))}}


@contextmanager
def listening(stub: Stub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": name} for name in stub.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.bodies.append(body)
            self._send(stub.status, stub.reply(body) if stub.status == 200 else {"error": "no"})

        def log_message(self, format: str, *args: Any) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def rewarded(model: object, base_urls: tuple[str, ...], *answers: str, **options: Any) -> list[Any]:
    """The reward or the error of each answer."""
    environment = RewardModelEnvironment(
        EnvironmentContext(seed=0), RewardModelConfig(path=str(model), base_urls=base_urls, **options)
    )

    async def ask() -> list[Any]:
        state = (await environment.reset({"prompt": "1+1="}, 0)).state
        turns = [Turn(text=answer, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP) for answer in answers]
        return await asyncio.gather(*(environment.step(state, one) for one in turns), return_exceptions=True)

    try:
        return [one if isinstance(one, BaseException) else one.reward for one in asyncio.run(ask())]
    finally:
        environment.close()


def test_values_come_from_servers_that_share_the_answers(reward_model):
    answers = [f"{number}" for number in range(12)]
    one, other = Stub(), Stub()
    with listening(one) as first, listening(other) as second:
        found = rewarded(reward_model, (f"{first}/v1", second), *answers, "x" * 200)
    tokens = encode(str(reward_model), [Conversation(prompt="1+1=", answer=answer) for answer in answers])
    assert found[:12] == pytest.approx([sum(each) / 1000 for each in tokens if not isinstance(each, Failure)])
    assert isinstance(found[12], RewardError)  # longer than the model reads: no server is asked
    assert len(one.bodies) + len(other.bodies) == 12
    assert min(len(one.bodies), len(other.bodies)) >= 4
    assert all(body["use_activation"] is False and body["model"] == "m" for body in one.bodies + other.bodies)


def test_the_tokens_are_those_that_a_process_of_the_run_scores(reward_model):
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    (tokens,) = encode(str(reward_model), [Conversation(prompt="1+1=", answer="2")])
    assert tokens == [*tokenizer.encode("1+1=2", add_special_tokens=False), tokenizer.eos_token_id]


WRONG = {
    "two labels": ({"probs": [0.1, 0.9]}, "2 values"),
    "an embedding": ({"probs": None}, "None"),
    "a value that is none": ({"probs": ["high"]}, "'high'"),
    "not finite": ({"probs": [math.inf]}, "inf"),
    "other tokens": ({"num_tokens": 3}, "a value of 3 tokens for 6"),
    "another model": ({"models": ("a", "b")}, "the models a, b"),
    "a refusal": ({"status": 400}, "status 400"),
}


@pytest.mark.parametrize(("changes", "text"), WRONG.values(), ids=WRONG)
def test_a_server_of_no_such_model_ends_the_run(reward_model, changes, text):
    with listening(Stub(**changes)) as url:
        (found,) = rewarded(reward_model, (url,), "2")
    assert isinstance(found, PluginError)
    assert text in str(found)


def test_servers_that_do_not_answer_leave_the_answer_without_a_reward(reward_model, monkeypatch):
    monkeypatch.setattr(endpoint_pool, "FIRST_PAUSE_S", 1e-3)
    stub = Stub(status=503)
    with listening(stub) as url:
        (found,) = rewarded(reward_model, (url,), "2", max_attempts=2)
    assert isinstance(found, RewardError)
    assert found.failure == "infrastructure"
    assert len(stub.bodies) == 2


@pytest.mark.wide
def test_vllms_server_gives_the_values_of_transformers(tmp_path):
    pytest.importorskip("vllm")
    model = make_model(tmp_path / "model", "llama", head="value", max_length=64, head_dim=32)
    command = ["vllm.entrypoints.openai.api_server", "--model", str(model), "--runner", "pooling", "--dtype", "float32"]
    with serving([*command, "--host", "127.0.0.1"], tmp_path / "log", VLLM_CPU_KVCACHE_SPACE="1") as url:
        found = rewarded(model, (url,), "2", "three", "")
    asked = [Conversation(prompt="1+1=", answer=answer) for answer in ("2", "three", "")]
    assert found == pytest.approx(score(Scoring(path=str(model)), asked), abs=1e-4)
