"""`rlcore serve` with the real vLLM, and a run that updates the server while it answers."""

import asyncio
import contextlib
import errno
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
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from click.testing import CliRunner
from safetensors.torch import load_file

from rlcore.cli.main import cli
from rlcore.spi import (
    CloseRequest,
    ConfigError,
    GenerateRequest,
    GeneratorContext,
    ModelError,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    ServeRequest,
    TensorSpec,
    WeightExport,
    WorkerError,
)
from rlcore.testing.models import make_model
from rlcore_torchkit.buckets import make_buckets
from rlcore_vllm import serve as serve_module
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.serve import serve, server_settings

PROMPT = [5, 6, 7, 8]
TOLERANCE = 1e-3
MAX_LENGTH = 16384  # a stream that nobody stops outlasts any refit
NUM_AFTER = 32
START_TIMEOUT_S = 400.0


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
    """`rlcore serve` on the first model, in a process of its own, until it gets Ctrl-C."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-c", "from rlcore.cli.main import main; main()", "serve", str(models[0]), "--name", "policy"]
    command += ["run.device=cpu", "generator.vllm.cpu_kv_cache_gib=0.1"]
    with socket.socket() as held, log.open("wb") as output:
        # The server may take the port in spite of this socket, which keeps it from everyone else until then.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        served = Served(process=process, port=port, log=log)
        try:
            served.wait()
            yield served
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, log.read_text()
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


def test_the_server_answers_with_the_models_own_probabilities(server: Served, models: list[Path]) -> None:
    (listed,) = server.get("/v1/models")["data"]
    assert (listed["id"], listed["max_model_len"]) == ("policy", MAX_LENGTH)
    tokens, found = server.complete(16)
    assert len(tokens) == 16
    np.testing.assert_allclose(found, logprobs(models[0], tokens), atol=TOLERANCE)
    assert np.abs(np.array(found) - logprobs(models[1], tokens)).max() > 100 * TOLERANCE
    with server.open("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "1+1"}]}) as answer:
        assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"


def test_its_port_is_taken_for_another(server: Served, models: list[Path]) -> None:
    result = CliRunner().invoke(cli, ["serve", str(models[1]), "--port", str(server.port)])
    assert result.exit_code == 2
    assert f"--port: found {server.port} on 127.0.0.1: address already in use" in result.stderr


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


def test_a_refit_of_a_run_reaches_the_server_while_it_generates(
    server: Served, models: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The request under way goes on: its first tokens are the old weights', its last the new ones'."""
    from rlcore_vllm.backend import VllmBackend

    gone = "http://127.0.0.1:9"
    config = VllmConfig(mirrors=(server.address, gone), cpu_kv_cache_gib=0.05, max_num_seqs=8)
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
        (warning,) = [record.message for record in caplog.records if record.name == "rlcore_vllm.mirrors"]
        assert f"mirror {gone} does not have version 1" in warning

        stream.join(120)
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


def request(model: Path, **options: Any) -> ServeRequest:
    values: dict[str, Any] = {"model": ModelSpec(path=str(model)), "device": "cpu", "host": "127.0.0.1", "port": 1, "name": "x"}
    return ServeRequest(**values | {"max_sequence_length": None} | options)


def test_what_cannot_be_served_is_said_before_vllm_is_imported(models: list[Path]) -> None:
    with pytest.raises(ConfigError) as raised:
        serve(request(models[0]), VllmConfig(cpu_kv_cache_gib=0.001))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("generator.vllm.cpu_kv_cache_gib", "0.001")
    assert "one sequence of 16384 tokens" in problem.expected
    assert "Pass --max-length" in problem.remedy
    with pytest.raises(ModelError) as raised:
        serve(request(models[0], max_sequence_length=20000), VllmConfig())
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == (str(models[0] / "config.json"), "max_position_embeddings = 16384")
    assert problem.expected.startswith("at least 20000")


def test_a_name_that_the_hub_does_not_have_is_no_defect(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as raised:
        serve(request(Path("no-such/model")), VllmConfig())
    assert [problem.path for problem in raised.value.problems] == ["no-such/model"]


def test_a_server_takes_the_sections_options_and_the_models_own_weights(models: list[Path]) -> None:
    config = VllmConfig(engine={"block_size": 32}, prefix_caching=False)
    arguments = server_settings(request(models[0], max_sequence_length=100), config).arguments
    wanted = {
        "load_format": "auto",
        "skip_tokenizer_init": False,
        "max_model_len": 100,
        "block_size": 32,
        "enable_prefix_caching": False,
        "hf_overrides": {},
        "worker_extension_cls": "rlcore_vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": "rlcore"},
    }
    assert {name: arguments[name] for name in wanted} == wanted
    assert "enable_sleep_mode" not in arguments


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, models: list[Path]) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Serves with a coroutine function in place of vLLM's."""

    def run(server: Callable[[], Awaitable[None]]) -> None:
        monkeypatch.setattr(serve_module, "run_server", lambda arguments: server())
        monkeypatch.setattr(serve_module, "server_environment", lambda settings, config: {})
        serve(request(models[0], max_sequence_length=64), VllmConfig())

    return run


def test_an_engine_that_does_not_start_is_explained(played: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """vLLM notices in its engine's process, whose output alone tells why; here it is a process that prints the same."""
    reason = (
        "ValueError: To serve at least one request with the model's max seq len (64), (0.03 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.01 GiB)."
    )

    async def fail() -> None:
        subprocess.run([sys.executable, "-c", f"import sys; print({reason!r}, file=sys.stderr)"], check=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(WorkerError) as error:
        played(fail)
    message = str(error.value)
    assert "the server did not start: one sequence of 64 tokens needs 0.03 GiB of KV cache; 0.01 GiB are left" in message
    assert message.endswith("or pass --max-length")
    assert reason in capfd.readouterr().err


def test_any_other_end_shows_what_was_printed_last(played: Any) -> None:
    async def fail() -> None:
        os.write(1, b"the last words\n")
        raise RuntimeError("something else")

    with pytest.raises(WorkerError, match="RuntimeError: something else(?s:.*)last words"):
        played(fail)

    async def find_the_port_taken() -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    with pytest.raises(ConfigError) as raised:
        played(find_the_port_taken)
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [("--port", "1: already in use")]


@pytest.mark.parametrize("died", [True, False])
def test_a_server_whose_engine_died_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, died: bool) -> None:
    """vLLM then shuts down as if it had been asked to."""

    class Server:
        async def shutdown(self) -> None:
            """As uvicorn's."""

    async def dummy_shutdown() -> None:
        """As what vLLM returns where the server ended by itself."""

    async def build_and_serve(*arguments: object) -> Any:
        return dummy_shutdown() if died else Server().shutdown()

    @contextlib.asynccontextmanager
    async def build_engine(arguments: object) -> AsyncIterator[None]:
        yield None

    entry = SimpleNamespace(
        setup_server=lambda arguments, reuse_port: ("address", socket.socket()),
        build_async_engine_client=build_engine,
        build_and_serve=build_and_serve,
    )
    monkeypatch.setattr("rlcore_vllm.versions.server_entry", lambda: entry)
    expected = pytest.raises(serve_module.EngineDiedError) if died else contextlib.nullcontext()
    with expected:
        asyncio.run(serve_module.run_server(Namespace()))
