"""Observer `profile`: names the hooks in the profile, and profiles a rank in a process of its own."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

from attrs import define

from rlcore.spi import ObserverContext
from rlcore_profiler.config import ProfileConfig
from rlcore_profiler.hooks import AllHooks
from rlcore_profiler.process_profile import FOLDER, ProcessProfile

NAME = "profile"
STEP_FILE = ".step"
"""File by which ranks read which step there is; the driver writes it."""


@define
class _OfThisProcess:
    """The profile of the driver's process; None in others."""

    profile: ProcessProfile | None = None


of_this_process = _OfThisProcess()


class RankProfile(AllHooks):
    """Profiles a rank, and names its hooks."""

    config: ClassVar[type] = ProfileConfig

    def __init__(self, context: ObserverContext) -> None:
        self._is_drivers = of_this_process.profile is not None or context.run_directory is None
        self._profile = of_this_process.profile
        self._file = Path()
        if not self._is_drivers and context.run_directory is not None:
            self._file = context.run_directory / FOLDER / STEP_FILE
            self._profile = ProcessProfile(context.run_directory, f"rank-{context.rank}", context.options)

    def during(self, hook: str) -> Generator[None, Any, Any]:
        """See AllHooks."""
        if self._profile is None:  # an evaluation, which has no steps
            return (yield)
        if not self._is_drivers:
            self._profile.turn_to(self._present_step())
        with self._profile.range(hook):
            return (yield)

    def before_close(self) -> None:
        """Write what is open."""
        if self._profile is not None and not self._is_drivers:
            self._profile.close()

    def _present_step(self) -> int:
        """Return the step by the driver's file; 0 before the first."""
        try:
            return int(self._file.read_text())
        except (OSError, ValueError):
            return 0
