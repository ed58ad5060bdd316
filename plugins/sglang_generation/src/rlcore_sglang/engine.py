"""The process that hosts an engine: starting it, calling it, noticing that it is dead or hangs, and ending it."""

import contextlib
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeAlias

from rlcore.spi import WorkerError
from rlcore_sglang.host import READY
from rlcore_workers.logged_process import LoggedProcess, new_log_file
from rlcore_workers.process import ending

CLOSE_TIMEOUT_S = 20.0
Answers: TypeAlias = "queue.SimpleQueue[tuple[str, Any]]"


class Engine:
    """An engine in a child process, whose output goes to a log file. Calls may come from several threads."""

    def __init__(self, arguments: Mapping[str, Any], log_directory: Path | None, start_timeout_s: float) -> None:
        """Start it; WorkerError where it ends before it is ready, or takes too long."""
        self._lock = threading.Lock()
        self._calls: dict[int, Answers] = {READY: queue.SimpleQueue()}
        self._numbers = itertools.count()
        self._is_over = False
        self._unread = ""
        """The reason why no more answers are read, where the process itself is not to blame."""
        self._connection, child = Pipe()
        self._process = LoggedProcess(
            [sys.executable, "-m", "rlcore_sglang.host", str(child.fileno())],
            new_log_file(log_directory, "sglang"),
            env=os.environ | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},  # `check` has seen to the length
            pass_fds=[child.fileno()],
        )
        child.close()
        threading.Thread(target=self._read, name="sglang-answers", daemon=True).start()
        try:
            self._connection.send(dict(arguments))
            self._await(READY, "the start", start_timeout_s, "start_timeout_s")
        except BrokenPipeError:
            raise self._death() from None
        except BaseException:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """True where it runs and answers."""
        return not self._is_over and self._process.poll() is None

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        key: str,
        on_sample: Callable[[Any], None] | None = None,
    ) -> Any:
        """Call a method of `host.Host`. `timeout_s`, the recipe's `key`, bounds the time until the next answer, after which the
        process is ended. An interrupted `generate` is aborted."""
        number = next(self._numbers)
        with self._lock:
            if self._is_over:
                raise self._death()
            self._calls[number] = queue.SimpleQueue()
        try:
            self._send(number, method, arguments)
            return self._await(number, method, timeout_s, key, on_sample)
        except WorkerError:
            raise
        except BaseException:
            with contextlib.suppress(WorkerError):
                self._send(next(self._numbers), "abort", (number,))
            raise

    def close(self) -> None:
        """End it, and what SGLang has started."""
        self._is_over = True
        self._process.kill_group()
        self._process.wait(CLOSE_TIMEOUT_S)
        self._connection.close()

    def _await(self, number: int, what: str, timeout_s: float, key: str, on_sample: Callable[[Any], None] | None = None) -> Any:
        answers = self._calls[number]
        try:
            while True:
                try:
                    kind, content = answers.get(timeout=timeout_s)
                except queue.Empty:
                    self._process.kill_group()
                    remedy = f"If it only needs longer, raise generator.sglang.{key}. {self._process.last_lines()}"
                    raise WorkerError(
                        f"SGLang gave no answer to {what} within {timeout_s:g} s and was ended. {remedy}"
                    ) from None
                if kind == "over":
                    raise self._death()
                if kind == "error":
                    raise WorkerError(f"SGLang failed in {what}: {content}. {self._process.last_lines()}")
                if kind == "result":
                    return content
                if on_sample is not None:
                    on_sample(content)
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def _send(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            with self._lock:
                self._connection.send((number, method, arguments))
        except OSError as error:
            raise self._death() from error

    def _read(self) -> None:
        """Hand answers to the calls that wait for them, until the process is gone."""
        try:
            while True:
                number, kind, content = self._connection.recv()
                with self._lock:
                    answers = self._calls.get(number)
                if answers is not None:
                    answers.put((kind, content))
        except (EOFError, OSError):
            pass
        except BaseException as error:  # an answer that cannot be read, such as of a class that is only there
            self._unread = f"found an answer that cannot be read ({type(error).__name__}: {error}). "
        finally:
            with self._lock:
                self._is_over = True
                for answers in self._calls.values():
                    answers.put(("over", None))

    def _death(self) -> WorkerError:
        self._process.kill_group()
        how = ending(self._process.wait(CLOSE_TIMEOUT_S))
        return WorkerError(f"{self._unread}SGLang's process ended with {how}. {self._process.last_lines()}")
