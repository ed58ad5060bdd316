"""Judges responses in worker processes, and replaces those that end."""

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from typing import Any

from rlcore.spi import PluginError

MAX_STARTS = 4
"""How often a response is given to a new worker because one has ended, which says nothing about the response."""


class Verifier:
    """`num_processes` workers, started when first needed. They end with this process: their input then ends."""

    def __init__(self, *, num_processes: int, timeout_s: float, max_memory_mib: int) -> None:
        self._arguments = [str(timeout_s), str(max_memory_mib)]
        self._idle: LifoQueue[_Worker | None] = LifoQueue()  # those that have been started come first
        for _ in range(num_processes):
            self._idle.put(None)
        # A thread waits for each worker, so that it matters to no worker which event loop asks.
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="verifier")

    async def judge(self, reference: str, response: str, *, require_boxed: bool) -> str:
        """A verdict of rlcore_math.answers, or "too_slow"; "failed" where the response ended the process that judged it, in
        another way than by its time; "killed" where that was done from outside, each time."""
        request = {"reference": reference, "response": response, "require_boxed": require_boxed}
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, request)

    def _ask(self, request: dict[str, Any]) -> str:
        worker = self._idle.get()
        try:
            for _ in range(MAX_STARTS):
                worker = worker or _Worker(self._arguments)
                answer = worker.ask(request)
                if answer is not None:
                    return str(answer["verdict"])
                worker = None
            return "killed"
        finally:
            self._idle.put(worker)


class _Worker:
    """One process that verifies answers."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "rlcore_math.worker", *arguments]
        # The order of sets must not differ from one worker to another, since what sympy tries first follows from it.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        greeting = self._read() or {"error": f"it ended with exit code {self._process.wait()}"}
        if "error" in greeting:
            raise PluginError(f"the process that checks answers ({' '.join(command)}) does not start: {greeting['error']}")

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, or None where the process ended without one."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._read()

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._process.wait()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer
