"""`rlcore serve` with vLLM: its OpenAI-compatible server in this process, whose weights a run may update while it answers."""

import asyncio
import contextlib
import errno
import os
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import evolve

from rlcore import spi
from rlcore.model_files import config_number
from rlcore_torchkit.process_group import loopback_variables
from rlcore_vllm.check import SHORTER, check
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.explain import SHORTER as SHORTER_TEXT
from rlcore_vllm.explain import explain
from rlcore_vllm.settings import EngineSettings, engine_settings, longest_sequence, replica_devices

NUM_LAST_LINES = 40
MAX_LENGTH = "pass --max-length"
LOOPBACK = ("127.", "localhost", "::1")


class EngineDiedError(Exception):
    """The engine's process is gone, so the server ended."""


def serve(request: spi.ServeRequest, config: VllmConfig) -> None:
    """Serve until the process is interrupted: with one engine, on the first `devices`, and without mirrors of its own.

    Besides OpenAI's routes there are vLLM's for development, through which a run updates the weights. They let everyone who
    reaches the address do so, which is why it is the machine itself unless the user says otherwise.
    """
    devices = None if config.devices is None else config.devices[: config.tensor_parallel]
    config = evolve(config, replicas=1, devices=devices, mirrors=())
    _raise_problems(request, config)
    settings = server_settings(request, config)
    os.environ.update(server_environment(settings, config))
    if not request.host.startswith(LOOPBACK):
        warning = f"warning: everyone who reaches {request.host}:{request.port} can change the weights of this server"
        print(warning, file=sys.stderr)
    last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
    try:
        with _watched_output(last_lines):
            asyncio.run(run_server(server_arguments(request, settings)))
    except spi.RlcoreError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            problem = spi.Problem(path="--port", found=f"{request.port}: already in use", expected="a port that is free")
            raise spi.ConfigError([problem]) from error
        raise spi.WorkerError(_end_message(error, "\n".join(last_lines))) from error


def server_settings(request: spi.ServeRequest, config: VllmConfig) -> EngineSettings:
    """A run's engine, but with the model's own weights and tokenizer, and its sampling defaults."""
    context = spi.GeneratorContext(
        model=request.model,
        rank_info=spi.RankInfo(device=request.device),
        seed=0,
        max_sequence_length=request.max_sequence_length or longest_sequence(request.model),
        channel="directory",
    )
    settings = engine_settings(context, config)
    changed: dict[str, Any] = {
        "max_model_len": request.max_sequence_length,
        "load_format": "auto",
        "generation_config": "auto",
        "skip_tokenizer_init": False,
        "disable_log_stats": False,
    }
    if request.device == "cuda":
        changed["enable_sleep_mode"] = False
    # The dtype of the head is left to vLLM, as in `vllm serve`: an output head that is quantised knows no other than its own.
    changed["hf_overrides"] = {}
    return evolve(settings, arguments={**settings.arguments, **changed, **config.engine})


def server_arguments(request: spi.ServeRequest, settings: EngineSettings) -> Namespace:
    """What `vllm serve` makes of its command line."""
    from rlcore_vllm.versions import import_without_torchao, server_parser

    import_without_torchao()
    arguments: Namespace = server_parser().parse_args([])
    vars(arguments).update(settings.arguments)
    vars(arguments).update(
        host=request.host, port=request.port, served_model_name=[request.name], chat_template=request.chat_template
    )
    return arguments


async def run_server(arguments: Namespace) -> None:
    """What `vllm serve` does; EngineDiedError where it ends although no one asked it to."""
    from rlcore_vllm.versions import server_entry, was_stopped

    server = server_entry()
    address, listening = server.setup_server(arguments, reuse_port=False)
    try:
        async with server.build_async_engine_client(arguments) as engine:
            shutdown = await server.build_and_serve(engine, address, listening, arguments)
        await shutdown
    finally:
        listening.close()
    if not was_stopped(shutdown):
        raise EngineDiedError


def server_environment(settings: EngineSettings, config: VllmConfig) -> dict[str, str]:
    """What the server needs in its environment, beside what an engine of a run does."""
    from rlcore_vllm.environment import child_environment

    variables = loopback_variables() | child_environment(settings, replica_devices(config, own_device=0)[0])
    del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return {**variables, "VLLM_SERVER_DEV_MODE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def _raise_problems(request: spi.ServeRequest, config: VllmConfig) -> None:
    """Raise ModelError or ConfigError with what `check` finds, for the longest sequence that clients may ask for."""
    longest = request.max_sequence_length or config_number(request.model.path, "max_position_embeddings") or 1
    context = spi.CheckContext(model=request.model, device=request.device, world_size=1, max_sequence_length=longest)
    problems = [
        evolve(problem, remedy=problem.remedy.replace(SHORTER, f"{MAX_LENGTH.capitalize()}."))
        for problem in check(context, config)
    ]
    if problems:
        about_model = all(Path(problem.path).is_relative_to(request.model.path) for problem in problems)
        raise (spi.ModelError if about_model else spi.ConfigError)(problems)


def _end_message(error: Exception, last_lines: str) -> str:
    """vLLM's error in rlcore's terms where it is known, else what was printed last."""
    known = explain(f"{error}\n{last_lines}")
    if known is not None:
        return f"the server did not start: {known.replace(SHORTER_TEXT, MAX_LENGTH)}"
    what = f"{type(error).__name__}: {error}" if str(error) else str(error.__doc__)
    return f"the server ended: {what} The last it printed:\n{last_lines}"


@contextlib.contextmanager
def _watched_output(last_lines: deque[str]) -> Iterator[None]:
    """Passes on to stderr what this process and its children print, and keeps the last lines: only there does vLLM's engine
    process say why it did not start."""
    reading, writing = os.pipe()
    stdout, stderr = os.dup(1), os.dup(2)

    def pass_on() -> None:
        with open(reading, "rb") as pipe:
            for line in pipe:
                os.write(stderr, line)
                last_lines.append(line.decode(errors="replace").rstrip())

    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    thread = threading.Thread(target=pass_on, name="rlcore-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        # A child that outlives the server holds the pipe open; what it prints is then passed on beside everything else.
        thread.join(timeout=1.0)
