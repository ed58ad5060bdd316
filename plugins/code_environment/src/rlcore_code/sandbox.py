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
from pathlib import Path

from attrs import frozen

from rlcore.spi import PluginError
from rlcore_code.config import CodeConfig

LAUNCHER = Path(__file__).with_name("launcher.py")
GRACE_S = 15.0
"""What starting and ending a program may take on a busy machine, beyond the program's own time."""
MAX_REPORT_BYTES = 1 << 16


@frozen(kw_only=True)
class Execution:
    """What a program wrote, and how it ended."""

    output: bytes
    exit_code: int | None
    """The program's, or the negative number of the signal that ended it; None where the clock or too much output did."""
    timed_out: bool


class Refused(PluginError):
    """The machine does not let a program be isolated."""


class Sandbox:
    """Starts programs, each in processes and a folder of its own, which do not outlast it."""

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        python = Path(sys.executable).resolve() if config.python is None else config.python
        library = [name for name in ("LD_LIBRARY_PATH",) if name in os.environ]  # which some interpreters need to start
        self._launcher_environment = {name: os.environ[name] for name in library}
        self._request = {
            "isolation": config.isolation,
            "cpu_time_s": config.cpu_time_s,
            "memory_bytes": config.max_memory_mib * 2**20,
            "disk_bytes": config.max_disk_mib * 2**20,
            "max_processes": config.max_processes,
            "python": str(python),
            "python_flags": ["-S"] if config.python is None else [],
            "visible": [sys.base_prefix, *map(str, config.readable)],
            "environment": {
                **self._launcher_environment,
                "HOME": "/box",
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",
                "OPENBLAS_NUM_THREADS": "1",
            },
        }

    async def run(self, files: Mapping[str, str], *, wall_time_s: float) -> Execution:
        """Run main.py of the files, with the file stdin as its input. Refused where it cannot be isolated; where this is
        cancelled, the program and all that it started are ended."""
        with _folder(self._config.isolation) as folder:
            request = {**self._request, "files": {"stdin": "", **files}, "wall_time_s": wall_time_s, "folder": folder}
            return await self._launch(json.dumps(request).encode(), wall_time_s + GRACE_S)

    async def _launch(self, request: bytes, limit_s: float) -> Execution:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(LAUNCHER)),
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
        output, told = b"", b""
        try:
            async with asyncio.timeout(limit_s):
                _, output, told = await asyncio.gather(
                    _send(process.stdin, request),
                    _read(process.stdout, max_bytes, process),
                    _read(process.stderr, MAX_REPORT_BYTES, process),
                )
                await process.wait()
        except TimeoutError:
            return Execution(output=b"", exit_code=None, timed_out=True)
        finally:
            _kill(process)
            await _finish(process, process.stdout, process.stderr)
        return Execution(output=output[:max_bytes], **_ending(told, flooded=len(output) > max_bytes))


def _folder(isolation: str) -> contextlib.AbstractContextManager[str]:
    """Where the files of a program without a file system of its own are."""
    if isolation == "namespaces":
        return contextlib.nullcontext("")
    return _temporary_folder()


@contextlib.contextmanager
def _temporary_folder():
    folder = tempfile.mkdtemp(prefix="rlcore-code-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _send(stream: asyncio.StreamWriter, request: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its report says why it ended
        stream.write(request)
        await stream.drain()
        stream.close()


async def _read(stream: asyncio.StreamReader, max_bytes: int, process: asyncio.subprocess.Process) -> bytes:
    """All that is written; where that is more than `max_bytes`, the process ends and more than these are returned."""
    chunks, size = [], 0
    while chunk := await stream.read(1 << 16):
        if size <= max_bytes:
            chunks.append(chunk)
            size += len(chunk)
        if size > max_bytes:
            _kill(process)
    return b"".join(chunks)


async def _finish(process: asyncio.subprocess.Process, *streams: asyncio.StreamReader) -> None:
    """Wait for a process that was killed. asyncio takes it for ended once its pipes are read to their ends."""
    with contextlib.suppress(TimeoutError):  # what escaped from "limits" may hold a pipe
        async with asyncio.timeout(GRACE_S):
            for stream in streams:
                while await stream.read(1 << 16):
                    pass
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """End the launcher and the first process of its namespace, with which the kernel ends all others in it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _ending(told: bytes, *, flooded: bool) -> dict[str, object]:
    """What the launcher reports. Refused where it started no program; PluginError where it failed otherwise."""
    reports = []
    for line in told.splitlines():
        with contextlib.suppress(ValueError):
            reports.append(json.loads(line))
    for report in reports:
        if "refused" in report:
            raise Refused(
                f"this machine does not let programs be isolated: {report['refused']}. See environment.code.isolation and "
                "environment.code.python"
            )
    if flooded:
        return {"exit_code": None, "timed_out": False}
    if not reports:
        raise PluginError(
            f"the launcher of programs ({LAUNCHER}) failed: {told.decode(errors='replace') or 'killed from outside'}"
        )
    code = reports[0]["exit"]
    return {"exit_code": code, "timed_out": code in (None, -signal.SIGXCPU)}
