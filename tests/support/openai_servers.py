"""Servers for the generator's tests, each in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 900.0
LIMIT = 256


@contextmanager
def serving(arguments: list[str], log: Path, **environment: str) -> Iterator[str]:
    """Run a command until the block ends; its API's address once it answers there."""
    with socket.socket() as held, log.open("wb") as output:
        # The server may take the port in spite of this socket, which keeps it from everyone else until then.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            start_new_session=True,
        )
        try:
            end = time.monotonic() + START_TIMEOUT_S
            while not answers(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(300)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def answers(port: int) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
    except (urllib.error.URLError, OSError):
        return False


def rlcore_serve(model: str, name: str = "policy", generator: str = "transformers", limit: int = LIMIT) -> list[str]:
    return [
        "rlcore",
        "serve",
        model,
        "--name",
        name,
        "--generator",
        generator,
        "run.device=cpu",
        "--max-length",
        str(limit),
    ]


def vllm_serve(model: str) -> list[str]:
    options = ["--max-model-len", str(LIMIT), "--dtype", "float32", "--logprobs-mode", "processed_logprobs"]
    options += ["--host", "127.0.0.1", "--enforce-eager", "--max-num-seqs", "64", "--disable-uvicorn-access-log"]
    return ["vllm.entrypoints.openai.api_server", "--model", model, *options]
