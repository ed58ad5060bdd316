"""The engine, in a process of its own."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.spi import WorkerError
from rlcore_workers.hosted import HostedProcess
from rlcore_workers.logged_process import new_log_file

COLLECT_S = 1.0
"""Most seconds that one call waits for samples to end."""


class Engine(HostedProcess):
    """An engine in a child process, whose output goes to a log file. Calls may come from several threads."""

    def __init__(self, arguments: Mapping[str, Any], log_directory: Path | None, start_timeout_s: float) -> None:
        """Start it; WorkerError where it ends before it is ready, or takes too long."""
        super().__init__(
            "SGLang",
            "rlcore_sglang.host",
            dict(arguments),
            new_log_file(log_directory, "sglang"),
            section="generator.sglang",
            environment=os.environ | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},  # `check` has seen to the length
        )
        self._numbers = itertools.count()
        try:
            self.await_engine(start_timeout_s)
        except BaseException:
            self.end()
            raise

    def ask(self, method: str, *arguments: Any, timeout_s: float, key: str) -> Any:
        """Call a method of `host.Host` that SGLang's event loop runs."""
        return self.call(lambda host: host.call(method, *arguments), method, timeout_s, key)

    def generate(
        self, samples: Sequence[Mapping[str, Any]], on_sample: Callable[[Any], None], *, timeout_s: float, key: str
    ) -> None:
        """Sample, and hand out each sample as it ends. `timeout_s`, the recipe's `key`, bounds the time until the next one,
        after which the process is ended. What is interrupted is aborted."""
        number, heard = next(self._numbers), time.monotonic()
        try:
            self.ask("submit", number, samples, timeout_s=timeout_s, key=key)
            while True:
                for kind, content in self.call(lambda host: host.collect(number, COLLECT_S), "generate", timeout_s, key):
                    if kind == "sample":
                        on_sample(content)
                    elif content is None:
                        return
                    else:
                        raise WorkerError(f"SGLang failed in generate: {content}. {self.process.last_lines()}")
                    heard = time.monotonic()
                if time.monotonic() - heard > timeout_s:
                    self.expire("generate", timeout_s, key)
        except WorkerError:
            raise
        except BaseException:
            with contextlib.suppress(WorkerError):
                self.ask("cancel", number, timeout_s=timeout_s, key=key)
            raise
