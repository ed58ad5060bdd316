"""Agents that are programs: each episode is a process group of its own, which does not outlive it."""

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence

from rlcore.spi import PluginError, RewardError

MAX_BYTES = 64 * 2**10
"""What is kept of the end of an agent's output."""
CHUNK_BYTES = 2**16
SHOWN = 400
KILL_S = 5.0
"""Most seconds that a killed process takes to be gone."""


async def run_process(command: Sequence[str], variables: Mapping[str, str], text: str) -> object:
    """Return the JSON in the last line that a program prints, given variables and a text on its standard input.

    However it ends, no process of its group is left. RewardError where it fails, or prints no JSON there; PluginError where it
    does not start.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**os.environ, **variables}, start_new_session=True
        )
    except OSError as error:
        raise PluginError(f"the agent {command[0]!r} does not start: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    printed, complained = (asyncio.create_task(_end_of(stream)) for stream in (process.stdout, process.stderr))
    written = asyncio.create_task(_write(process.stdin, text))
    try:
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started must not hold its output open, or go on
        written.cancel()
        # Shielded, since the process has to be waited for although the episode is over.
        await asyncio.shield(asyncio.wait([printed, complained, written, asyncio.create_task(process.wait())], timeout=KILL_S))
        for task in (printed, complained):
            task.cancel()
    output, errors = (task.result() if task.done() and not task.cancelled() else "" for task in (printed, complained))
    if code != 0:
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        raise RewardError(f"the agent ended with {how}. The last it printed: {(errors or output).strip()[-SHOWN:]}")
    last = (output.strip().splitlines() or [""])[-1].strip()
    try:
        return json.loads(last)
    except ValueError as error:
        expected = "a number, or a JSON object with `reward`"
        raise RewardError(f"the agent printed no reward: its last line is {last[:SHOWN]!r}; expected {expected}") from error


async def _end_of(stream: asyncio.StreamReader) -> str:
    kept = b""
    while chunk := await stream.read(CHUNK_BYTES):
        kept = (kept + chunk)[-MAX_BYTES:]
    return kept.decode(errors="replace")


async def _write(stream: asyncio.StreamWriter, text: str) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read it
        stream.write(text.encode())
        await stream.drain()
        stream.close()
