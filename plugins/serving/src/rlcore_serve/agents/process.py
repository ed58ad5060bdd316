"""Runs agents that are programs. An episode's processes end with it, and with the run, however that ends."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence

from rlcore.reading import parse_json
from rlcore.secrets import child_environment, masked
from rlcore.spi import PluginError, RewardError, fails_as
from rlcore_workers.descendants import MARK, NOT_STARTED, end_marked, marked, supervised
from rlcore_workers.process import ending

MAX_BYTES = 64 * 2**10
"""The size of an agent's output that is kept, from its end."""
SHOWN = 400
KILL_S = 5.0
"""Most seconds to wait until a program's processes have ended and its output is read."""
STDIN, STDOUT, STDERR = range(3)


async def run_process(command: Sequence[str], variables: Mapping[str, str], text: str) -> object:
    """Run a program with a text on its standard input, and return the JSON in the last line of its output.

    Its environment is that of `child_environment` with `variables`. All processes that it has started end with it. RewardError
    where it fails, or prints no JSON there; PluginError where it does not start.
    """
    variables = {**variables, **marked()}
    starting = asyncio.create_task(_start(command, variables))
    try:
        program = await asyncio.shield(starting)
    except asyncio.CancelledError:  # in the middle of its start
        starting.add_done_callback(_end)
        # asyncio waits for ever where the start itself is cancelled, by a loop that closes, before the pipes are connected.
        asyncio.get_running_loop().call_later(KILL_S, starting.cancel)
        raise
    try:
        program.write(text)
        await program.has_exited.wait()
    finally:
        program.end()
        # In this task: another one that an event loop cancels as it closes, before its first line, would close nothing.
        await _close(program, variables[MARK])
    output, errors = program.printed(STDOUT), program.printed(STDERR)
    if program.exit_code != 0 and errors.startswith(NOT_STARTED):  # the program itself may end with any exit code
        raise PluginError(f"the agent {command[0]!r} does not start: {masked(errors[len(NOT_STARTED) :])[-SHOWN:]}")
    if program.exit_code != 0:
        with fails_as("infrastructure" if program.exit_code == -signal.SIGKILL else "environment"):
            raise RewardError(
                f"the agent ended with {ending(program.exit_code)}. The last it printed: {masked(errors or output)[-SHOWN:]}"
            )
    last = (output.splitlines() or [""])[-1].strip()
    try:
        return parse_json(last)
    except ValueError as error:
        expected = "a number, or a JSON object with `reward`"
        raise RewardError(
            f"the agent printed no reward: its last line is {masked(last)[:SHOWN]!r}; expected {expected}"
        ) from error


class _Program(asyncio.SubprocessProtocol):
    """A running program and its supervisor. asyncio's `Process.wait` is no use here: it waits for the end of the output, which
    child processes hold open."""

    def __init__(self) -> None:
        self.has_exited = asyncio.Event()
        self.exit_code = 0
        """Negative: the signal that ended it."""
        self._transport: asyncio.SubprocessTransport
        self._kept = {STDOUT: b"", STDERR: b""}
        self._open = {STDOUT, STDERR}
        self._is_gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] = (self._kept[fd] + data)[-MAX_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        self._open.discard(fd)
        self._look()

    def process_exited(self) -> None:
        self.exit_code = self._transport.get_returncode() or 0
        self.has_exited.set()
        self._look()

    def _look(self) -> None:
        if self.has_exited.is_set() and not self._open and not self._is_gone.done():
            self._is_gone.set_result(None)

    def write(self, text: str) -> None:
        """Give it its standard input, which it need not read."""
        pipe = self._transport.get_pipe_transport(STDIN)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(text.encode())
        pipe.write_eof()

    def end(self) -> None:
        """Signal the supervisor, which ends the program and its child processes."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._transport.terminate()
            self._transport.send_signal(signal.SIGCONT)  # the program may have stopped it

    async def close(self) -> None:
        """Wait until its processes have ended and its output is read; CancelledError comes after that."""
        try:
            await asyncio.wait([self._is_gone], timeout=KILL_S)
        except asyncio.CancelledError:  # an event loop that closes has to hear of the end before
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([self._is_gone], timeout=KILL_S)
            raise
        finally:
            self.forget()

    def forget(self) -> None:
        """Hear of it no more."""
        self._transport.close()

    def printed(self, stream: int) -> str:
        """The end of what it printed."""
        return self._kept[stream].decode(errors="replace").strip()


async def _close(program: _Program, mark: str) -> None:
    """Wait for a program's end. What one that has killed its supervisors leaves is ended."""
    try:
        if program.has_exited.is_set() and program.exit_code == -signal.SIGKILL:
            await asyncio.to_thread(end_marked, mark)
    finally:
        await program.close()


async def _start(command: Sequence[str], variables: Mapping[str, str]) -> _Program:
    loop, environment = asyncio.get_running_loop(), {**child_environment(), **variables}
    try:
        _, program = await loop.subprocess_exec(
            _Program, *supervised(command), stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment, start_new_session=True
        )
    except OSError as error:
        raise PluginError(f"the agent {command[0]!r} does not start: {error}") from error
    return program


def _end(starting: "asyncio.Task[_Program]") -> None:
    """End a program whose start was cancelled, and succeeded nevertheless."""
    if not starting.cancelled() and starting.exception() is None:
        program = starting.result()
        program.end()
        asyncio.get_running_loop().call_later(KILL_S, program.forget)
