"""One execution of a program in a sandbox, as the trainer sees it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

from attrs import frozen

from rlcore.spi import PluginError
from rlcore_code.config import CodeConfig
from rlcore_code.interpreter import needed_by
from rlcore_code.system_calls import call_filter, unsupported

LAUNCHER = Path(__file__).with_name("launcher.py")
GRACE_S = 15.0
"""Seconds beyond the program's own time for its start and end on a busy machine."""
MAX_REPORT_BYTES = 1 << 16
INTERPRETER = (sys.executable, "-I", "-S")
"""The interpreter and the flags that run the launcher."""
NUM_STARTS = 2
SHOWN = 2000
CPU_SIGNALS = (-signal.SIGKILL, -signal.SIGXCPU)
CPU_SHARE = 0.5
"""A program that was killed after this share of its processor time, and more, ran out of it. The kernel's limit counts whole
ticks of its clock, which may be more than what was used."""


@frozen(kw_only=True)
class Execution:
    """The output of a program, and its end."""

    output: bytes
    exit_code: int | None
    """The program's exit code, or the negative number of the signal that ended it.

    None where a limit of time, output or files ended it, or its launcher failed.
    """
    timed_out: bool
    is_lost: bool = False
    """True where its launcher did not end in time, whatever the program did."""


class Refused(PluginError):
    """Raised where the machine cannot isolate a program."""


class _LauncherFailed(Exception):
    """Raised where a launcher does not report how its program ended."""


class Sandbox:
    """Runs programs, each in separate processes and a separate folder, which end with it."""

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        self._python = Path(sys.executable).resolve() if config.python is None else config.python
        self._flags = ("-S",) if config.python is None else ()
        library = [name for name in ("LD_LIBRARY_PATH",) if name in os.environ]  # some interpreters need it to start
        self._launcher_environment = {name: os.environ[name] for name in library}
        self._program_environment = {
            **self._launcher_environment,
            "HOME": "/box",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",
        }

    async def run(self, files: Mapping[str, str], *, wall_time_s: float, stdin: str = "") -> Execution:
        """Run main.py of the files and return its execution.

        Where the launcher fails, the program runs once more and then counts as failed. Refused where an empty program does not
        run either. Cancelling ends the program and all of its processes.
        """
        deadline = monotonic() + wall_time_s
        for _ in range(NUM_STARTS):
            with suppress(_LauncherFailed):
                return await self._run_once(files, stdin, max(deadline - monotonic(), 0.0))
        try:
            await self._run_once({"main.py": ""}, "", self._config.wall_time_s)
        except _LauncherFailed as error:
            raise Refused(
                f"this machine does not let programs be isolated: {error}. See environment.code.isolation and "
                "environment.code.python"
            ) from None
        return Execution(output=b"", exit_code=None, timed_out=False)

    async def _run_once(self, files: Mapping[str, str], stdin: str, wall_time_s: float) -> Execution:
        if reason := unsupported():
            raise _LauncherFailed(reason)
        needed = needed_by(self._python, self._flags, tuple(self._program_environment.items()))
        with _folder(self._config.isolation) as folder:
            request = {
                "isolation": self._config.isolation,
                "parent": os.getpid(),
                "folder": folder,
                "files": files,
                "stdin": stdin,
                "wall_time_s": wall_time_s,
                "cpu_time_s": self._config.cpu_time_s,
                "memory_bytes": self._config.max_memory_mib * 2**20,
                "disk_bytes": self._config.max_disk_mib * 2**20,
                "max_processes": self._config.max_processes,
                "python": str(self._python),
                "python_flags": self._flags,
                "environment": self._program_environment,
                "visible": sorted({*needed.visible, *map(str, self._config.readable)}),
                "hidden": needed.hidden,
                "call_filter": call_filter(self._config.isolation),
            }
            return await self._launch(json.dumps(request).encode(), wall_time_s + GRACE_S)

    async def _launch(self, request: bytes, limit_s: float) -> Execution:
        process = await asyncio.create_subprocess_exec(
            *(*INTERPRETER, str(LAUNCHER)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=self._launcher_environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        max_bytes = self._config.max_output_kib * 1024
        output, stderr = b"", b""
        try:
            async with asyncio.timeout(limit_s):
                _, output, stderr = await asyncio.gather(
                    _send(process.stdin, request),
                    _read(process.stdout, max_bytes, process),
                    _read(process.stderr, MAX_REPORT_BYTES, process),
                )
                await process.wait()
        except TimeoutError:
            return Execution(output=b"", exit_code=None, timed_out=True, is_lost=True)
        finally:
            _kill(process)
            await _finish(process, process.stdout, process.stderr)
        if len(output) > max_bytes:
            return Execution(output=output[:max_bytes], exit_code=None, timed_out=False)
        exit_code, timed_out = _ending(stderr, self._config.cpu_time_s)
        return Execution(output=output, exit_code=exit_code, timed_out=timed_out)


def _folder(isolation: str) -> contextlib.AbstractContextManager[str]:
    """Make a folder for the files of a program; with "namespaces" the launcher mounts one, and the path is empty."""
    if isolation == "namespaces":
        return contextlib.nullcontext("")
    return _temporary_folder()


@contextlib.contextmanager
def _temporary_folder():
    folder = tempfile.mkdtemp(prefix="rlcore-code-")
    try:
        yield folder
    finally:
        with suppress(OSError):
            os.chmod(folder, 0o700)  # the program may have changed it
        shutil.rmtree(folder, ignore_errors=True)


async def _send(stream: asyncio.StreamWriter, request: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the launcher's report has the reason
        stream.write(request)
        await stream.drain()
        stream.close()


async def _read(stream: asyncio.StreamReader, max_bytes: int, process: asyncio.subprocess.Process) -> bytes:
    """Read a stream to its end. Beyond `max_bytes` end the process and return more than `max_bytes`."""
    chunks, size = [], 0
    while chunk := await stream.read(1 << 16):
        if size <= max_bytes:
            chunks.append(chunk)
            size += len(chunk)
        if size > max_bytes:
            _kill(process)
    return b"".join(chunks)


async def _finish(process: asyncio.subprocess.Process, *streams: asyncio.StreamReader) -> None:
    """Wait for a killed process. asyncio reports its end once its pipes are at their ends."""
    with suppress(TimeoutError):  # a process that escaped "limits" may hold a pipe open
        async with asyncio.timeout(GRACE_S):
            for stream in streams:
                while await stream.read(1 << 16):
                    pass
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the launcher and the first process of its namespace; the kernel then kills all others in it."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _ending(stderr: bytes, cpu_time_s: float) -> tuple[int | None, bool]:
    """Return the exit code that the launcher reports, and whether time ran out. _LauncherFailed without a report."""
    try:
        *_, report = [json.loads(line) for line in stderr.splitlines() if line.startswith(b"{")]
        if "refused" in report:
            raise _LauncherFailed(report["refused"])
        code, used_s, timed_out = report["exit"], report["cpu_time_s"], report["timed_out"]
    except (ValueError, KeyError, TypeError):
        found = stderr.decode(errors="replace")[-SHOWN:] or "it was ended from outside"
        raise _LauncherFailed(f"the launcher of programs ({LAUNCHER}) failed: {found}") from None
    return code, timed_out or (code in CPU_SIGNALS and used_s > CPU_SHARE * cpu_time_s)
