"""Observer `rank_status`: the work and memory of each rank, in a file that `rlcore top` and the sink `prometheus` read."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from rlcore.spi import ObserverContext
from rlcore_profiler.hooks import AllHooks

FOLDER = "ranks"
WRITE_S = 2.0
"""Seconds between two writes. A rank whose file gets old is stopped, or in native code that lets nothing else run."""
IDLE = "idle"


class RankStatus(AllHooks):
    """Keeps the present hook; a thread writes it, so that no hook waits for the disk."""

    def __init__(self, context: ObserverContext) -> None:
        self._rank = context.rank
        self._file = None if context.run_directory is None else context.run_directory / FOLDER / f"rank-{context.rank}.json"
        self._doing: list[tuple[str, float]] = []
        """The hooks under way and since when, in seconds since 1970: a stream goes on beside others."""
        self._seconds: dict[str, float] = {}
        """The seconds of the last call of each hook."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def during(self, hook: str) -> Generator[None, Any, Any]:
        """See AllHooks."""
        self._start()
        began = hook, time.time()
        start = time.perf_counter()
        with self._lock:
            self._doing.append(began)
        try:
            return (yield)
        finally:
            with self._lock:
                self._doing.remove(began)
                self._seconds[hook] = time.perf_counter() - start

    def before_close(self) -> None:
        """Write the last state."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_over.set()
            thread.join()

    def _start(self) -> None:
        if self._file is not None and self._thread is None:
            self._is_over.clear()
            self._thread = threading.Thread(target=self._write_all, args=(self._file,), name="rank-status", daemon=True)
            self._thread.start()

    def _write_all(self, file: Path) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.is_set()
            with contextlib.suppress(OSError):  # a full disk ends no rank
                file.parent.mkdir(parents=True, exist_ok=True)
                partial = file.with_suffix(".partial")
                partial.write_text(json.dumps(self._state()))
                partial.replace(file)
            if not is_last:
                self._is_over.wait(WRITE_S)

    def _state(self) -> dict[str, Any]:
        with self._lock:
            hook, since = self._doing[-1] if self._doing else (IDLE, None)
            seconds = dict(self._seconds)
        return {
            "rank": self._rank,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "written": time.time(),
            "hook": hook,
            "since": since,
            "seconds": seconds,
            "memory_bytes": memory_bytes(),
        }


def memory_bytes() -> dict[str, int]:
    """Bytes of this process: `resident` on the host, and on its CUDA device `allocated`, `reserved` and `most_allocated` by
    torch, `device_used` by all processes, and `device_total`."""
    found = {"resident": psutil.Process().memory_info().rss}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_available() and cuda.is_initialized():
        free, total = cuda.mem_get_info()
        found |= {
            "allocated": cuda.memory_allocated(),
            "reserved": cuda.memory_reserved(),
            "most_allocated": cuda.max_memory_allocated(),
            "device_used": total - free,
            "device_total": total,
        }
    return found
