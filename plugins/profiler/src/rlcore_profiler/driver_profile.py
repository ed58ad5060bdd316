"""The observer of the loop: profiles the driver's process, and says to ranks in other processes which step there is."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from rlcore.files import write_atomically
from rlcore.run.observers import ObservedRun
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopObserver
from rlcore.spi import Problem
from rlcore_profiler.config import ProfileConfig
from rlcore_profiler.process_profile import FOLDER, ProcessProfile
from rlcore_profiler.profile import NAME, STEP_FILE, of_this_process


class DriverProfile(LoopObserver):
    """Turns the profiles to each step as it begins."""

    def __init__(self, run_directory: Path, options: ProfileConfig, *, is_rank: bool) -> None:
        """`is_rank`: whether the driver's process is the one that trains."""
        self._profile = ProcessProfile(run_directory, "rank-0" if is_rank else "driver", options)
        self._is_profiled = is_rank or options.profiler == "torch"  # Nsight's calls would take memory of a rank's device
        self._file = run_directory / FOLDER / STEP_FILE
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._step = 0
        of_this_process.profile = self._profile

    def on_start(self, step: int) -> None:
        """The step after `step` begins."""
        self._begin(step + 1)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - the step alone counts
        """Remember the step that ends."""
        self._step = step

    def on_idle(self) -> None:
        """The next step begins."""
        self._begin(self._step + 1)

    def on_close(self) -> None:
        """Write what is open."""
        self._profile.close()
        self._file.unlink(missing_ok=True)
        of_this_process.profile = None

    def _begin(self, step: int) -> None:
        self._step = step - 1
        # A new file each time, so that machines which share the folder do not read a cached one.
        write_atomically(self._file, str(step))
        if self._is_profiled:
            self._profile.turn_to(step)


def driver_profile(run: ObservedRun) -> LoopObserver:
    """Return the observer; one that does nothing where the recipe does not name `profile`."""
    if NAME not in run.recipe.observers.names:
        return LoopObserver()
    return DriverProfile(run.directory.path.absolute(), _options(run.plan), is_rank=run.recipe.cluster is None)


def profile_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield what is wrong with the section in this run."""
    if NAME not in plan.recipe.observers.names:
        return
    options, num_steps = _options(plan), plan.recipe.run.num_steps
    if options.steps[1] > num_steps:
        found = f"{list(options.steps)} in a run of {num_steps} steps"
        yield Problem(path=f"observers.{NAME}.steps", found=found, expected=f"steps from 1 to {num_steps}")
    if options.profiler == "nsight" and plan.device != "cuda":
        found = f'"nsight" in a run on {plan.device}'
        remedy = 'Set profiler = "torch", which profiles CPUs too.'
        yield Problem(path=f"observers.{NAME}.profiler", found=found, expected="a run on CUDA", remedy=remedy)


def _options(plan: RunPlan) -> ProfileConfig:
    return cast("ProfileConfig", plan.observer_options[NAME])
