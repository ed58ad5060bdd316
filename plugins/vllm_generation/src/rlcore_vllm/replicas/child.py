"""One process that hosts an engine: starting it, calling it, noticing that it is dead or hangs, and ending it."""

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.spi import RlcoreError, WorkerError
from rlcore_vllm.engines.environment import child_environment
from rlcore_vllm.engines.explain import explain
from rlcore_vllm.replicas.host import HostManager, HostOrder
from rlcore_vllm.setup.settings import EngineSettings
from rlcore_workers.logged_process import LoggedProcess
from rlcore_workers.process import ending

START_POLL_S = 0.02
LOOK_S = 1.0
"""Most seconds that a time counts in which this process itself stood still: no engine is late by it."""


class Child:
    """A process with an engine, whose output is appended to a file."""

    def __init__(self, name: str, settings: EngineSettings, devices: tuple[int, ...], log_file: Path) -> None:
        """Begin to start it."""
        self._name = name
        # A name in Linux's abstract namespace: a file would outlive processes that are killed.
        address = f"\0rlcore-vllm-{secrets.token_hex(16)}"
        self._order = HostOrder(settings=settings, address=address, authkey=secrets.token_bytes(32), parent=os.getpid())
        self._killed_because: str | None = None
        self._host: Any = None
        command = [sys.executable, "-m", "rlcore_vllm.replicas.host"]
        environment = child_environment(settings, devices)
        self.process = LoggedProcess(command, log_file, env=environment, stdin=subprocess.PIPE)

    def await_engine(self, timeout_s: float) -> None:
        """Wait until the engine is ready; WorkerError where it ends before, or is not ready in time."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.write(pickle.dumps(self._order))
            self.process.stdin.close()
        deadline = time.monotonic() + timeout_s
        manager = HostManager(address=self._order.address, authkey=self._order.authkey)
        while not _connects(manager):
            if self.process.poll() is not None:
                raise self._death("while it started")
            if time.monotonic() > deadline:
                remedy = "if it only needs longer, raise generator.vllm.start_timeout_s"
                self._kill(f"was not ready within {timeout_s:g} s and was ended; {remedy}")
                raise self._death()
            time.sleep(START_POLL_S)
        self._host = manager.host()  # type: ignore[attr-defined]

    @property
    def is_usable(self) -> bool:
        """Return whether it runs and has never been given up."""
        return self._host is not None and self._killed_because is None and self.process.poll() is None

    def call(self, function: Callable[[Any], Any], what: str, timeout_s: float, key: str | None = None) -> Any:
        """Return function(host), called in this thread. WorkerError where the process dies or is killed after `timeout_s`,
        which is the recipe's `key`."""

        try:
            with limited(timeout_s, partial(self.expire, what, timeout_s, key)):
                return function(self._host)
        except WorkerError as error:
            raise self.with_output(error) from error
        except RlcoreError:
            raise
        except (EOFError, OSError) as error:
            raise self._death() from error
        except Exception as error:
            raise WorkerError(f"{self._name} failed in {what}: {error}\n{self.process.last_lines()}") from error

    def expire(self, what: str, timeout_s: float, key: str | None = None) -> None:
        """Kill it, since it takes too long."""
        remedy = f"; if it only needs longer, raise generator.vllm.{key}" if key else ""
        self._kill(f"gave no answer to {what} within {timeout_s:g} s and was ended{remedy}")

    def give_up(self) -> None:
        """Kill it, since nobody waits for it any more."""
        self._kill("was ended as it started, since its generator is closed")

    def with_output(self, error: WorkerError) -> WorkerError:
        """An error of the engine, with the process's last lines of output."""
        return WorkerError(f"{self._name}: {error}\n{self.process.last_lines()}")

    def end(self) -> None:
        """Kill what is left of it: itself, and what vLLM has started."""
        self.process.kill_group()
        self.process.wait()

    def _kill(self, reason: str) -> None:
        if self.process.poll() is None:
            self._killed_because = reason
            self.process.kill_group()

    def _death(self, when: str = "") -> WorkerError:
        how = ending(self.process.wait())
        reason = self._killed_because or f"ended {f'{when} ' if when else ''}with {how}"
        explanation = explain(self.process.output()) if when else None
        cause = f": {explanation}" if explanation else ""
        return WorkerError(f"{self._name} {reason}{cause}. {self.process.last_lines()}")


@contextlib.contextmanager
def limited(timeout_s: float, expire: Callable[[], None]) -> Iterator[None]:
    """Call `expire` in a thread of its own where the block takes longer."""
    is_over = threading.Event()

    def wait() -> None:
        left_s = timeout_s
        while left_s > 0:
            if is_over.wait(min(LOOK_S, left_s)):
                return
            left_s -= LOOK_S
        expire()

    threading.Thread(target=wait, name="limit", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _connects(manager: HostManager) -> bool:
    try:
        manager.connect()
    except ConnectionRefusedError:
        return False  # nothing listens yet
    return True
