"""An engine in a process of its own, as a replica."""

import contextlib
import itertools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlcore.spi import RlcoreError, WorkerError
from rlcore_vllm.child import Child
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.engine import Deliver, settle
from rlcore_vllm.explain import is_passing
from rlcore_vllm.sampling import Samples
from rlcore_vllm.settings import EngineSettings

logger = logging.getLogger(__name__)
COLLECT_S = 1.0
"""Most seconds that one call waits for samples to end."""
CLOSE_TIMEOUT_S = 30.0
NUM_STARTS = 3
"""How often an engine is started at most, where another process disturbs its start."""
LONGEST_DIRECTORY = 60
"""Bytes; the system bounds the path of a socket to 107."""


class ProcessReplica:
    """An engine in a child process, whose output goes to a log file. Its calls but generate are made one after another."""

    def __init__(
        self, name: str, settings: EngineSettings, devices: tuple[int, ...], config: VllmConfig, log_directory: Path | None
    ) -> None:
        self.name = name
        self.devices = devices
        self._settings = settings
        self._config = config
        # In a run directory a socket's path might be too long.
        self._directory = Path(tempfile.mkdtemp(prefix="rlcore-vllm-", dir=_short_temporary_directory()))
        if log_directory is None:
            # Not removed, since errors name it.
            descriptor, file = tempfile.mkstemp(prefix=f"rlcore-{name}-", suffix=".log")
            os.close(descriptor)
            self.log_file = Path(file)
        else:
            log_directory.mkdir(parents=True, exist_ok=True)
            self.log_file = log_directory / f"{name}.log"
        self._numbers = itertools.count()
        self._child: Child | None = None
        self._in_order = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def start(self) -> None:
        for _ in range(NUM_STARTS - 1):
            try:
                self._child = self._started()
                return
            except WorkerError as error:
                if not is_passing(str(error)):
                    raise
                logger.warning("%s is started again: %s", self.name, error)
        self._child = self._started()

    def _started(self) -> Child:
        address = self._directory / f"{next(self._numbers)}.socket"
        child = Child(self.name, self._settings, self.devices, self.log_file, address)
        try:
            child.await_engine(self._config.start_timeout_s)
        except BaseException:
            child.end()
            raise
        return child

    def generate(self, samples: Samples, deliver: Deliver) -> Future[None]:
        future: Future[None] = Future()
        child = self._child
        # In order, so that a refit that begins after this call does not overtake it.
        submitted = self._submit("submit", samples)

        def collect(host: Any, number: int) -> None:
            is_last = False
            while not is_last:
                finished, is_last = host.collect(number, COLLECT_S)
                if finished:
                    deliver(finished)
                if future.cancelled() and not is_last:
                    host.cancel(number)
                    return

        def work() -> None:
            error = None
            try:
                number = submitted.result()
                self._call(child, lambda host: collect(host, number), "generate", "generate_timeout_s")
            except RlcoreError as raised:
                error = raised
            settle(future, error)

        threading.Thread(target=work, name=f"{self.name}-generate", daemon=True).start()
        return future

    def begin_update(self) -> Future[None]:
        return self._submit("begin_update")

    def call_workers(self, method: str, kwargs: Mapping[str, Any]) -> Future[list[Any]]:
        return self._submit("call_workers", method, dict(kwargs))

    def end_update(self, weight_version: int) -> Future[None]:
        return self._submit("end_update", weight_version)

    def set_residency(self, *, weights: bool, cache: bool, discard_weights: bool) -> Future[int]:
        return self._submit("set_residency", weights, cache, discard_weights)

    def restart(self) -> None:
        """Start the engine anew, in the same process if that still answers, which spares the imports."""
        if self._child is not None and self._child.is_usable:
            try:
                self._call(self._child, lambda host: host.restart(), "restart", "start_timeout_s")
                return
            except RlcoreError as error:
                logger.warning("%s gets a new process: %s", self.name, error)
        self._end()
        self.start()

    def close(self) -> None:
        if self._child is not None and self._child.is_usable:
            with contextlib.suppress(RlcoreError):
                self._child.call(lambda host: host.close(), "close", CLOSE_TIMEOUT_S)
        self._end()
        self._in_order.shutdown(wait=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _submit(self, method: str, *arguments: Any) -> Future[Any]:
        """A call that the host carries out after those before it: buckets of a refit must not overtake each other."""
        child = self._child
        return self._in_order.submit(
            self._call, child, lambda host: getattr(host, method)(*arguments), method, "refit_timeout_s"
        )

    def _call(self, child: Child | None, function: Callable[[Any], Any], what: str, key: str) -> Any:
        if child is None:
            raise WorkerError(f"{self.name}: there is no engine: it could not be started")
        return child.call(function, what, getattr(self._config, key), key)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _short_temporary_directory() -> str | None:
    """The usual one, or /tmp where its path is too long to hold a socket."""
    return None if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_DIRECTORY else "/tmp"
