"""The process that forks trials, in the interpreter that has Harbor. All that trials start ends with them, and with the run."""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.schema.file_limits import expanded
from rlcore.secrets import child_environment, masked
from rlcore_workers import descendants
from rlcore_workers.process import ending

PROGRAM = Path(__file__).with_name("trial_program.py")
CLOSE_S = 35.0
"""Most seconds in which the trials under way remove their containers."""
MAX_BYTES = 64 * 2**20
"""Most bytes of an answer."""
SHOWN = 800
OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of the run's own Python environment, which another interpreter does not get."""
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""litellm, which Harbor imports, asks for no list of prices."""


class ProgramError(Exception):
    """A trial's process, or the server, ended without an answer."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.is_killed = exit_code == -signal.SIGKILL
        """True where another process killed it."""


class TrialServer:
    """A running server. Each request gets a process of its own."""

    def __init__(self, python: str | None, names: tuple[str, ...], options: Mapping[str, Any]) -> None:
        """Start it. `python` None is the run's interpreter; `names` are further environment variables. `options` name the agent
        and the environment that it imports. OSError where it cannot."""
        self._is_other, self._names, self._options = python is not None, names, options
        self._mark = descendants.marked()
        self._folder = Path(tempfile.mkdtemp(prefix="rlcore-harbor-"))
        try:
            self._process = self._start(sys.executable if python is None else str(expanded(python)))
        except OSError:
            shutil.rmtree(self._folder)
            raise
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, which the first request reports
            self._process.stdin.write(f"{json.dumps(dict(options))}\n".encode())
            self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
        """Return whether the process lives."""
        return self._process.poll() is None

    async def ask(self, request: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the answer to a request, whose process gets `variables`. A caller that is cancelled cancels the trial.
        ProgramError where no answer comes."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._folder / "socket", limit=MAX_BYTES)
        except OSError as error:
            raise self._error() from error
        try:
            writer.write(self._line(request, variables))
            line = await reader.readline()
        except ConnectionError:
            line = b""
        finally:
            writer.close()
        return self._answer(line)

    def ask_now(self, request: Mapping[str, Any], variables: Mapping[str, str], seconds: float) -> Mapping[str, Any]:
        """Return the answer to a request, without an event loop. TimeoutError after `seconds`."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            try:
                connection.connect(str(self._folder / "socket"))
                connection.sendall(self._line(request, variables))
                line = connection.makefile("rb").readline(MAX_BYTES)
            except ConnectionError:
                line = b""
        return self._answer(line)

    def close(self, seconds: float = CLOSE_S) -> None:
        """Cancel the trials under way. Kill what is left after `seconds`."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.terminate()  # the supervisor, which ends the others
        self._process.wait()
        descendants.end_marked(self._mark[descendants.MARK])
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, interpreter: str) -> "subprocess.Popen[bytes]":
        with socket.socket(socket.AF_UNIX) as listener, (self._folder / "errors").open("wb") as errors:
            listener.bind(str(self._folder / "socket"))
            listener.listen(1024)
            number = listener.fileno()
            command = [interpreter, "-P", str(PROGRAM), str(number), descendants.__file__]  # -P: no modules of its folder
            return subprocess.Popen(
                descendants.supervised(command),
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                env=self._variables({}),
                pass_fds=[number],
                start_new_session=True,
            )

    def _variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        found = {**child_environment(self._names), **OFFLINE, **variables, **self._mark}
        return {name: value for name, value in found.items() if name not in OTHERS or name in self._names or not self._is_other}

    def _line(self, request: Mapping[str, Any], variables: Mapping[str, str]) -> bytes:
        return f"{json.dumps({**self._options, **request, 'variables': self._variables(variables)})}\n".encode()

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        if not line.endswith(b"\n"):
            raise self._error()
        answer: Mapping[str, Any] = json.loads(line)
        if "exit_code" in answer:
            raise ProgramError(_ended("a trial's process", answer["exit_code"], answer["output"]), answer["exit_code"])
        return answer

    def _error(self) -> ProgramError:
        """Return why no answer came: the end of the server, or of a trial's two processes."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        errors = (self._folder / "errors").read_bytes().decode(errors="replace").strip()
        if errors.startswith(descendants.NOT_STARTED):
            reason = errors[len(descendants.NOT_STARTED) :][:SHOWN]
            return ProgramError(f"the interpreter does not start: {reason}", 1)
        if code is None:
            return ProgramError("a trial's process was killed from outside", -signal.SIGKILL)
        return ProgramError(_ended("the process of all trials", code, errors), code)


def _ended(what: str, code: int, output: str) -> str:
    return f"{what} ended with {ending(code)}. The last it printed: {masked(output)[-SHOWN:]}"
