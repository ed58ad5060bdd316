"""The profile of one process: begins and ends with the steps of the range, and names what goes on within them.

torch is imported where it is used: every run imports this module, and plugins are listed without torch.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcore.files import storage_errors
from rlcore_profiler.config import ProfileConfig

FOLDER = "profiles"


class ProcessProfile:
    """Profiles one process. All methods may be called in any thread."""

    def __init__(self, run_directory: Path, name: str, options: ProfileConfig) -> None:
        """`name` is that of the process in files, such as "rank-0"."""
        self._directory, self._name, self._options = run_directory / FOLDER, name, options
        self._lock = threading.Lock()
        self._step: int | None = None
        """The step that is being profiled."""
        self._profile: Any = None

    def turn_to(self, step: int) -> None:
        """A step begins, or goes on: end the profile of another one, and begin that of this one if it is in the range."""
        first, last = self._options.steps
        wanted = step if first <= step <= last else None
        with self._lock:
            if wanted != self._step:
                goes_on = wanted is not None and self._step is not None and self._options.profiler == "nsight"
                if self._step is not None and not goes_on:
                    self._end(self._step)
                if wanted is not None and not goes_on:
                    self._begin()
                self._step = wanted

    def close(self) -> None:
        """End what is being profiled."""
        self.turn_to(0)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Give what goes on in the block a name in the profile."""
        if self._step is None:
            yield
        else:
            import torch

            named = torch.profiler.record_function if self._options.profiler == "torch" else torch.cuda.nvtx.range
            with named(name):
                yield

    def _begin(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if self._options.profiler == "nsight":
            torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
            return
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            with_stack=self._options.with_stack,
            profile_memory=self._options.with_memory,
            # Streams of samples, and backward passes, have threads of their own.
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.start()

    def _end(self, step: int) -> None:
        if self._options.profiler == "nsight":
            import torch

            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
            return
        ended, self._profile = self._profile, None
        ended.stop()
        folder = self._directory / f"step-{step:06d}"
        with storage_errors("a profile", self._directory):
            folder.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(folder / f"{self._name}.json.gz"))
