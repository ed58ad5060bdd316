"""A pool of processes for what may hang, crash or take all memory: each call costs at most its own process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Pipe
from queue import LifoQueue
from typing import Any

from rlcore.secrets import child_environment
from rlcore.spi import PluginError
from rlcore_workers.descendants import end_descendants
from rlcore_workers.process import Ended, NotStarted, Task

MAX_STARTS = 4
"""Most new processes for a request whose process has ended: the request is not the cause."""
MAX_PROCESSES = 32
"""Most processes of a pool that nobody gave a number."""


def default_processes() -> int:
    """One for each core that this process may use, at most MAX_PROCESSES."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_cores, MAX_PROCESSES)


class WorkerPool:
    """`num_processes` processes, started when first needed. They end with `close`, and with this process."""

    def __init__(self, task: Task, num_processes: int) -> None:
        self._task = task
        self._num_processes = num_processes
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._open()

    def _open(self) -> None:
        self._idle: LifoQueue[_Process | None] = LifoQueue()  # those that have been started come first
        for _ in range(self._num_processes):
            self._idle.put(None)
        self._threads: ThreadPoolExecutor | None = None

    async def call(self, request: object) -> Any:
        """Return the task's answer, or Ended where the request ended every process that worked on it.

        A cancelled call kills its process and all its descendants. PluginError where processes do not start.
        """
        with self._lock:
            # A thread waits for each process, so that it matters to no process which event loop asks.
            self._threads = self._threads or ThreadPoolExecutor(self._num_processes, thread_name_prefix=self._task.name)
            call = _Call(self._task, request, self._idle)
            self._calls.add(call)
            asked = asyncio.get_running_loop().run_in_executor(self._threads, call.make)
        try:
            return await asked
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            with self._lock:
                self._calls.discard(call)

    def close(self) -> None:
        """Kill the processes and end the threads. A pool can be used again, and then starts others."""
        with self._lock:
            threads, idle, calls = self._threads, self._idle, list(self._calls)
            self._open()
        for call in calls:
            call.cancel()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        while not idle.empty():
            if (process := idle.get()) is not None:
                process.kill()


def end_calls(pool: WorkerPool, thread: ThreadPoolExecutor, futures: Collection[Future[Any]]) -> None:
    """End a thread that calls a pool, and the calls of its futures."""
    thread.shutdown(wait=False, cancel_futures=True)
    while running := [future for future in futures if not future.done()]:
        pool.close()  # again, since one of them may have been about to start
        wait(running, 0.05)
    pool.close()


class _Call:
    """One request, in the thread that waits for its answer and in those that may end it."""

    def __init__(self, task: Task, request: object, idle: "LifoQueue[_Process | None]") -> None:
        self._task = task
        self._request = request
        self._idle = idle
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._cancelled = False

    def make(self) -> Any:
        """The answer, from an idle process or a new one."""
        process = self._idle.get()
        try:
            for _ in range(1 if self._task.is_tried_once else MAX_STARTS):
                with self._lock:
                    if self._cancelled:
                        break
                    process = self._process = process or _Process(self._task)
                with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
                    return process.ask(self._request)
                process.kill()
                process = None
            return Ended(-signal.SIGKILL)
        except PluginError:
            process = None
            if not self._cancelled:  # which ends a process that starts, too
                raise
            return Ended(-signal.SIGKILL)
        except BaseException:  # a request that cannot be pickled
            if process is not None:
                process.kill()
                process = None
            raise
        finally:
            with self._lock:
                self._process = None
                if self._cancelled and process is not None:
                    process.kill()
                    process = None
            self._idle.put(process)

    def cancel(self) -> None:
        """Kill the process that works on it, where there is one, and start none."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()


class _Process:
    """One process of a pool, the leader of a session of its own."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlcore_workers.process", str(theirs.fileno()), task.name],
                stdin=subprocess.DEVNULL,
                stderr=None if task.shows_output else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # The order of sets must not differ from one process to another, since answers may follow from it.
                env={**child_environment(task.pass_environment), "PYTHONHASHSEED": "0"},
            )
        self._is_ready = False

    def ask(self, request: object) -> Any:
        """The answer. EOFError or BrokenPipeError where the process has ended."""
        if not self._is_ready:
            self._start()
        self._connection.send(request)
        return self._connection.recv()

    def kill(self) -> None:
        """Kill the process and all its descendants. Any thread may call this, and more than once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left
            if self._process.returncode is None:  # else its number may be another's by now
                end_descendants(self._process.pid)
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        try:
            self._connection.send(self._task)
            failure = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            failure = NotStarted(f"it ended with exit code {self._process.wait()}")
        if isinstance(failure, NotStarted):
            self.kill()
            name = self._task.name
            raise PluginError(f"a process of {name!r} (rlcore_workers.process) does not start: {failure.traceback}")
        self._is_ready = True
