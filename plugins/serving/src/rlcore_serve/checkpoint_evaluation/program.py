"""Runs the evaluation of one checkpoint in a process of its own: server, program, figures."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from attrs import field, frozen

from rlcore.files import private
from rlcore.reading import numbers
from rlcore_serve.checkpoint_evaluation.result import NoFiguresError, read_figures
from rlcore_serve.checkpoint_evaluation.rules import filled
from rlcore_workers.process import ending

HOST = "127.0.0.1"
SERVED_NAME = "policy"
ASK_S = 0.2
"""Seconds between two looks at whether the server answers."""
STOPS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""The signals that end a whole job."""
SHELLS_SIGNAL = 128
"""A shell whose program a signal ended has an exit code of so much more than the signal's number."""
END_S = 10.0
"""Seconds that the server has to end by itself."""


@frozen(kw_only=True)
class Evaluation:
    """The evaluation of one checkpoint, picklable."""

    directory: Path
    """The evaluation's own: `model`, `output`, and what was printed."""
    step: int
    run_directory: Path
    command: tuple[str, ...]
    """With its placeholders."""
    variables: Mapping[str, str]
    """The whole environment of the program. This process has other variables too."""
    server_variables: Mapping[str, str]
    """The whole environment of the server."""
    serve: tuple[str, ...] | None
    """Arguments of `rlcore serve` besides model, address and name; None where nothing is served."""
    result_file: str | None
    result_key: str | None


@frozen(kw_only=True)
class Outcome:
    """The outcome of an evaluation."""

    figures: Mapping[str, Any] = field(factory=dict, validator=numbers)
    """Numbers, which may be NaN."""
    failure: str | None = None
    """Why there are no figures."""
    was_stopped: bool = False
    """True where a signal that stops whole jobs ended it, which says nothing about the model."""


class _FailedError(Exception):
    """Why the program did not run, or not to its end."""

    def __init__(self, message: str, code: int = 0) -> None:
        """`code` is that of the process that ended."""
        super().__init__(message)
        self.was_stopped = -code in STOPS or code - SHELLS_SIGNAL in STOPS


def evaluate(argument: None, wanted: Evaluation) -> Outcome:  # noqa: ARG001 - what a pool's tasks receive
    """Run the program, and the server if it is wanted, and read the figures."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which ends the server; a run in the background ignores it
    output = wanted.directory / "output"
    values = {"model": wanted.directory / "model", "step": wanted.step, "output": output, "run_directory": wanted.run_directory}
    try:
        shutil.rmtree(output, ignore_errors=True)  # of an attempt that was killed: its figures are not this one's
        output.mkdir(parents=True)
        if wanted.serve is None:
            _run(filled(wanted.command, values), wanted)
        else:
            with _server(wanted, wanted.serve) as port:
                url = f"http://{HOST}:{port}/v1"
                _run(filled(wanted.command, {**values, "port": port, "url": url}), wanted)
        printed = wanted.directory / "stdout.log"
        return Outcome(figures=read_figures(printed, output, wanted.result_file, wanted.result_key))
    except _FailedError as error:
        return Outcome(failure=str(error), was_stopped=error.was_stopped)
    except (NoFiguresError, OSError) as error:
        return Outcome(failure=str(error))
    except Exception as error:  # such as a pattern that no glob takes, or a number beyond all floats
        return Outcome(failure=f"{type(error).__name__}: {error}")


def _run(command: Sequence[str], wanted: Evaluation) -> None:
    out_file, err_file = wanted.directory / "stdout.log", wanted.directory / "stderr.log"
    with open(out_file, "wb", opener=private) as out, open(err_file, "wb", opener=private) as err:
        program = _start(command, wanted.variables, out.fileno(), err.fileno())
        code = program.wait()
    if code != 0:
        raise _FailedError(f"{command[0]} ended with {ending(code)}", code)


def _start(command: Sequence[str], variables: Mapping[str, str], out: int, err: int) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables)
    except (OSError, ValueError) as error:
        raise _FailedError(f"{command[0]} does not start: {error}") from error


@contextmanager
def _server(wanted: Evaluation, arguments: Sequence[str]) -> Iterator[int]:
    """The port of `rlcore serve`, once it answers."""
    with _reserved_port() as port:
        address = ("--host", HOST, "--port", str(port), "--name", SERVED_NAME)
        arguments, key = _without_key(arguments)
        command = (sys.executable, "-m", "rlcore", "serve", str(wanted.directory / "model"), *address, *arguments)
        with open(wanted.directory / "server.log", "wb", opener=private) as log:
            server = _start(command, {**wanted.server_variables, **key}, log.fileno(), log.fileno())
        try:
            _wait_until_it_answers(server, port)
            yield port
        finally:
            server.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                server.wait(END_S)
            server.kill()
            server.wait()


def _without_key(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move `--api-key` from the arguments, which the list of processes shows, into a variable of the environment."""
    left, key = list(arguments), {}
    for place, argument in enumerate(arguments):
        option, assigned, value = argument.partition("=")
        if option == "--api-key":
            value = value if assigned else "".join(arguments[place + 1 : place + 2])
            key, left[place : place + (1 if assigned else 2)] = {"RLCORE_API_KEY": value}, []
            break
    return left, key


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else is given while the server loads its model: another run's server would answer in its place.

    On Linux it is kept until the block ends, and the server can listen there, as it does with SO_REUSEADDR; elsewhere nothing
    can where another socket is bound, and it is free from now on."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, 0))
        port = int(reserved.getsockname()[1])
        if sys.platform != "linux":
            reserved.close()
        yield port


def _wait_until_it_answers(server: "subprocess.Popen[bytes]", port: int) -> None:
    opener = build_opener(ProxyHandler({}))  # a proxy of the environment's is for what is not here
    while True:
        if (code := server.poll()) is not None:
            raise _FailedError(f"rlcore serve ended with {ending(code)} before it answered; server.log says more", code)
        with suppress(OSError), opener.open(f"http://{HOST}:{port}/health", timeout=5):
            return
        time.sleep(ASK_S)
