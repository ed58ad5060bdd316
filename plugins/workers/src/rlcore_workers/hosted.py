"""A process that hosts an engine: starting it, calling it, noticing that it is dead or hangs, and ending it.

The process begins with a module that calls `read_order`, makes the engine, and serves an object, whose methods are called
through a multiprocessing manager, each call in a thread of its own.
"""

import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from attrs import frozen

from rlcore.spi import RlcoreError, WorkerError
from rlcore_workers.descendants import end_with
from rlcore_workers.logged_process import LoggedProcess, append_lines
from rlcore_workers.process import ending
from rlcore_workers.stacks import beginning_of, stacks_of

START_POLL_S = 0.02
LOOK_S = 1.0
"""Most seconds that a time counts in which this process itself stood still: no engine is late by it."""


@frozen(kw_only=True)
class HostOrder:
    """The parent's message to the standard input, pickled."""

    settings: Any
    """Arguments of the engine."""
    address: str
    """The socket to listen on once the engine is ready."""
    authkey: bytes
    parent: int
    """Its process id: the host ends when that process does."""


class HostManager(BaseManager):
    """Both ends of the connection; the host registers `host` with the object behind it."""


HostManager.register("host")


def read_order() -> HostOrder:
    """The order of the parent, with which this process ends from now on."""
    order: HostOrder = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(order.parent)
    return order


def serve(host: Any, order: HostOrder, exposed: Sequence[str]) -> None:
    """Answer the parent's calls of these methods until it ends the process."""
    HostManager.register("host", callable=lambda: host, exposed=exposed)
    HostManager(address=order.address, authkey=order.authkey).get_server().serve_forever()


class HostedProcess:
    """A process with an engine, whose output is appended to a file."""

    def __init__(
        self,
        name: str,
        module: str,
        settings: Any,
        log_file: Path,
        *,
        section: str,
        environment: Mapping[str, str],
        explain: Callable[[str], str | None] = lambda _output: None,
    ) -> None:
        """Begin to start it, by `module`. `section` is the recipe's that has its options; `explain` says in the recipe's terms
        why an engine with this output does not start."""
        self._name, self._section, self._explain = name, section, explain
        # A name in Linux's abstract namespace: a file would outlive processes that are killed.
        address = f"\0rlcore-{secrets.token_hex(16)}"
        self._order = HostOrder(settings=settings, address=address, authkey=secrets.token_bytes(32), parent=os.getpid())
        self._killed_because: str | None = None
        self._expiring = threading.Lock()
        """Held while stacks are read, which one call of several that are late does."""
        self._host: Any = None
        self.process = LoggedProcess([sys.executable, "-m", module], log_file, env=environment, stdin=subprocess.PIPE)

    def await_engine(self, timeout_s: float) -> None:
        """Wait until the engine is ready; WorkerError where it ends before, or is not ready in time."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.write(pickle.dumps(self._order))
            self.process.stdin.close()
        deadline = time.monotonic() + timeout_s
        manager = HostManager(address=self._order.address, authkey=self._order.authkey)
        while not connects(manager):
            if self.process.poll() is not None:
                raise self._death("while it started")
            if time.monotonic() > deadline:
                remedy = f"if it only needs longer, raise {self._section}.start_timeout_s"
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
        which is the section's `key`."""

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
        except BaseException:  # interrupted: this thread's next call shall not take the answer that still comes
            self._host._tls.__dict__.pop("connection", None)
            raise

    def expire(self, what: str, timeout_s: float, key: str | None = None) -> None:
        """Kill it, since it takes too long; its stacks, as far as they can be read, go to its log and into the error."""
        remedy = f"; if it only needs longer, raise {self._section}.{key}" if key else ""
        with self._expiring:
            if self.process.poll() is None:
                stacks = stacks_of(self.process.pid)
                append_lines(self.process.log_file, stacks)
                self._kill(f"gave no answer to {what} within {timeout_s:g} s and was ended{remedy}. {beginning_of(stacks)}")

    def give_up(self) -> None:
        """Kill it, since nobody waits for it any more."""
        self._kill("was ended as it started, since its generator is closed")

    def with_output(self, error: WorkerError) -> WorkerError:
        """An error of the engine, with the process's last lines of output."""
        return WorkerError(f"{self._name}: {error}\n{self.process.last_lines()}")

    def end(self) -> None:
        """Kill what is left of it: itself, and what its engine has started."""
        self.process.kill_group()
        self.process.wait()

    def _kill(self, reason: str) -> None:
        if self.process.poll() is None:
            self._killed_because = reason
            self.process.kill_group()

    def _death(self, when: str = "") -> WorkerError:
        how = ending(self.process.wait())
        reason = self._killed_because or f"ended {f'{when} ' if when else ''}with {how}"
        explanation = self._explain(self.process.output()) if when else None
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


def connects(manager: HostManager) -> bool:
    """Connect to a host; returns whether it listens yet."""
    try:
        manager.connect()
    except ConnectionRefusedError:
        return False
    return True
