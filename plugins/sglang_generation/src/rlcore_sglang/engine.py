"""The process that hosts an engine: starting it, calling it, noticing that it is dead or hangs, and ending it."""

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeAlias

from rlcore.files import private
from rlcore.spi import WorkerError
from rlcore_sglang.host import READY

NUM_LOG_LINES = 30
CLOSE_TIMEOUT_S = 20.0
Answers: TypeAlias = "queue.SimpleQueue[tuple[str, Any]]"


class Engine:
    """An engine in a child process, whose output goes to a log file. Calls may come from several threads."""

    def __init__(self, arguments: Mapping[str, Any], log_directory: Path | None, start_timeout_s: float) -> None:
        """Start it; WorkerError where it ends before it is ready, or takes too long."""
        self._log_file = _log_file(log_directory)
        self._lock = threading.Lock()
        self._calls: dict[int, Answers] = {READY: queue.SimpleQueue()}
        self._numbers = itertools.count()
        self._is_over = False
        self._unread = ""
        """Why no more answers are read, where the process itself is not to blame."""
        self._connection, child = Pipe()
        with open(self._log_file, "ab", opener=private) as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlcore_sglang.host", str(child.fileno())],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},  # `check` has seen to the length
                start_new_session=True,  # so that ^C reaches the driver alone, and that one signal ends SGLang's processes too
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
        """Whether it runs and answers."""
        return not self._is_over and self._process.poll() is None

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        key: str,
        on_sample: Callable[[Any], None] | None = None,
    ) -> Any:
        """A method of `host.Host`. `timeout_s` bounds the time until the next answer, which `key` of the recipe's section says:
        after it the process is ended. An interrupted `generate` is aborted."""
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
        self._kill()
        self._process.wait(CLOSE_TIMEOUT_S)
        self._connection.close()

    def _await(self, number: int, what: str, timeout_s: float, key: str, on_sample: Callable[[Any], None] | None = None) -> Any:
        answers = self._calls[number]
        try:
            while True:
                try:
                    kind, content = answers.get(timeout=timeout_s)
                except queue.Empty:
                    self._kill()
                    remedy = f"If it only needs longer, raise generator.sglang.{key}"
                    raise WorkerError(
                        f"SGLang gave no answer to {what} within {timeout_s:g} s and was ended. {remedy}. {self._output_note()}"
                    ) from None
                if kind == "over":
                    raise self._death()
                if kind == "error":
                    raise WorkerError(f"SGLang failed in {what}: {content}. {self._output_note()}")
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

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _death(self) -> WorkerError:
        self._kill()
        code = self._process.wait(CLOSE_TIMEOUT_S)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerError(f"{self._unread}SGLang's process ended with {how}. {self._output_note()}")

    def _output_note(self) -> str:
        with self._log_file.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "\n".join([f"Its output is in {self._log_file}", *lines])


def _log_file(directory: Path | None) -> Path:
    """Where its output goes; where no folder is given, a file that is not removed, since errors name it."""
    if directory is None:
        descriptor, file = tempfile.mkstemp(prefix="rlcore-sglang-", suffix=".log")
        os.close(descriptor)
        return Path(file)
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "sglang.log"
