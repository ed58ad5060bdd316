"""The evaluations of a run's checkpoints: one after another in a thread, each on a model exported for it alone."""

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from attrs import asdict, frozen

from rlcore.config.recipe import Recipe
from rlcore.files import write_atomically
from rlcore.reading import read_record
from rlcore.registry.plugin_errors import first_line
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.observers import ObservedRun
from rlcore.run.protocols import LoopObserver
from rlcore.run.report.metrics_file import append_metrics
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.secrets import child_environment
from rlcore.spi import EvaluatedRun, StorageError
from rlcore_serve.checkpoint_evaluation.program import Evaluation, Outcome, evaluate
from rlcore_workers.pool import WorkerPool, end_calls
from rlcore_workers.process import Ended, Task, ending

RESULT = "result.json"
TASK = Task(
    name="rlcore-evaluation",
    handle=f"{evaluate.__module__}:{evaluate.__name__}",
    is_tried_once=True,
    leaves_signals=True,
)
NUM_SHOWN = 5
"""Figures that a note tells."""
GRACE_S = 2.0
"""Seconds before a failure counts: what stops the whole job may reach a program before it reaches the run."""


@frozen(kw_only=True)
class _Result(Outcome):
    """An outcome as result.json keeps it."""

    step: int
    seconds: float


class CheckpointEvaluations(LoopObserver):
    """The evaluations of one run, in its driver. The folder of a step holds `model` until its figures are in metrics.jsonl, so
    that a resumed run does what one that was killed had left undone, and nothing twice."""

    def __init__(self, run: EvaluatedRun) -> None:
        self._run = run
        self._recipe: Recipe = run.recipe
        assert self._recipe.checkpoint_evaluation is not None
        self._options = self._recipe.checkpoint_evaluation
        self._pool = WorkerPool(TASK, 1)
        self._open()

    def _open(self) -> None:
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=TASK.name)
        self._under_way: dict[int, Future[_Result]] = {}

    def on_start(self, step: int) -> None:
        """The run goes on from `step`: later evaluations are of a training that is forgotten, earlier ones are ended."""
        if any(known > step for known in self._under_way):
            self.on_close()
            self._open()
        for known, folder in sorted(self._folders().items()):
            if known > step:
                shutil.rmtree(folder, ignore_errors=True)
            elif known not in self._under_way and (folder / "model").is_dir():
                self._add(known)

    def on_checkpoint_saved(self, step: int, export: Callable[[Path], Path]) -> None:
        """Measure the checkpoint of `step`, if it is due, by a model exported for that alone."""
        if self._wants(step):
            self._measure_checkpoint(step, export)

    def on_idle(self) -> None:
        """Hand on the figures that are there; the recipe may want no step to begin before they are."""
        self._report(waits=self._options.wait)

    def on_last_step(self) -> None:
        """Hand on all figures."""
        self._report(waits=True)

    def _wants(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is to be measured, and neither was nor will be."""
        every = self._recipe.checkpoint.every_n_steps * self._options.every_n_checkpoints
        is_last = self._recipe.checkpoint.at_end and step == self._recipe.run.num_steps
        is_due = step > 0 and (is_last or (every > 0 and step % every == 0))
        return is_due and step not in self._under_way and not (self._folder(step) / RESULT).is_file()

    def _measure_checkpoint(self, step: int, export: Callable[[Path], Path]) -> None:
        num_waiting = sum(not future.done() for future in self._under_way.values()) - 1
        if num_waiting >= self._options.max_waiting and step != self._recipe.run.num_steps:
            self._run.note(
                f"the checkpoint of step {step} is not evaluated: {num_waiting} others wait. Raise "
                "checkpoint_evaluation.max_waiting or every_n_checkpoints, or set wait = true"
            )
            return
        folder = self._folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            export(folder / "model")
        except StorageError as error:
            self._run.note(f"the checkpoint of step {step} is not evaluated: {first_line(error)}")
            return
        self._add(step)

    def _report(self, *, waits: bool) -> None:
        """Hand on the figures of evaluations that have ended, or of all; an interrupt may end the waiting."""
        with self._run.deferred():
            self._report_ended()
        while waits and self._under_way:
            with self._run.waiting():
                wait(self._under_way.values(), return_when=FIRST_COMPLETED)
            with self._run.deferred():
                self._report_ended()

    def _report_ended(self) -> None:
        for step in [step for step, future in self._under_way.items() if future.done()]:
            result = self._under_way.pop(step).result()
            self._tell(result)
            if not result.was_stopped:
                shutil.rmtree(self._folder(step) / "model", ignore_errors=True)

    def on_close(self) -> None:
        """Kill what is under way; a resumed run does it again."""
        self._closing.set()
        end_calls(self._pool, self._thread, self._under_way.values())

    def _add(self, step: int) -> None:
        self._under_way[step] = self._thread.submit(self._evaluate, step)

    def _evaluate(self, step: int) -> _Result:
        """In the thread: the result, as it is in the folder or is written there. What ended with the run, or by a signal that
        may be to stop it, leaves none."""
        folder, start = self._folder(step), time.monotonic()
        try:
            if (folder / RESULT).is_file():  # the run was killed before it had reported the figures
                return read_record(folder / RESULT, _Result)
            outcome = Outcome(failure="the run ended") if self._closing.is_set() else asyncio.run(self._measured(step))
            result = _Result(**asdict(outcome), step=step, seconds=time.monotonic() - start)
            if result.failure is not None and not result.was_stopped:
                self._closing.wait(GRACE_S)
            if not self._closing.is_set() and not result.was_stopped:
                write_atomically(folder / RESULT, json.dumps(asdict(result), indent=2))
        except Exception as error:  # such as no room on the disk, or a process that does not start
            return _Result(failure=first_line(error), step=step, seconds=time.monotonic() - start)
        finally:
            self._pool.close()  # with what the program left running
        return result

    async def _measured(self, step: int) -> Outcome:
        options = self._options
        wanted = Evaluation(
            directory=self._folder(step).absolute(),
            step=step,
            run_directory=self._run.directory.absolute(),
            command=options.command,
            variables={**child_environment(options.pass_environment), **options.environment},
            server_variables={**os.environ, **options.environment},
            serve=(*_arguments_of_run(self._recipe), *options.serve_arguments) if options.serve else None,
            result_file=options.result_file,
            result_key=options.result_key,
        )
        try:
            answer = await asyncio.wait_for(self._pool.call(wanted), options.timeout_s)
        except TimeoutError:
            return Outcome(
                failure=f"it took longer than checkpoint_evaluation.timeout_s = {options.timeout_s:g} and was killed"
            )
        return Outcome(failure=f"its process ended with {ending(answer.exit_code)}") if isinstance(answer, Ended) else answer

    def _tell(self, result: _Result) -> None:
        what = f"evaluation of the checkpoint of step {result.step}"
        if result.was_stopped:
            self._run.note(f"{what} was stopped: {result.failure}. It is done again once the run is resumed")
            return
        if result.failure is not None:
            where = self._folder(result.step)
            self._run.note(f"{what} failed: {result.failure}. What was printed is in {where}: stdout.log, stderr.log")
            return
        self._run.log(result.step, result.figures)
        shown = [f"{name} {value:.4g}" for name, value in list(result.figures.items())[:NUM_SHOWN]]
        more = len(result.figures) - len(shown)
        self._run.note(f"{what}: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}")

    def _folder(self, step: int) -> Path:
        return self._run.directory / "evaluations" / f"step-{step:06d}"

    def _folders(self) -> dict[int, Path]:
        found = (
            (re.fullmatch(r"step-([0-9]+)", path.name), path) for path in (self._run.directory / "evaluations").glob("step-*")
        )
        return {int(match[1]): path for match, path in found if match is not None}


def checkpoint_evaluations(run: ObservedRun) -> CheckpointEvaluations:
    """Build what runs the recipe's program on the run's checkpoints."""
    for label in run.sinks.without_evaluations:
        run.progress.note(f"{label} takes no figures of evaluated checkpoints; they are in metrics.jsonl")
    return CheckpointEvaluations(evaluated_run(run.recipe, run.directory, run.sinks, run.progress, run.clock, run.guard))


def evaluated_run(
    recipe: Recipe, directory: RunDirectory, sinks: Sinks, progress: Progress, clock: PhaseClock, guard: InterruptGuard
) -> EvaluatedRun:
    """The run as its evaluations see it."""

    def log(step: int, figures: Mapping[str, float]) -> None:
        append_metrics(directory.metrics_file, step, figures)
        sinks.log_evaluation(step, figures)

    return EvaluatedRun(
        recipe=recipe,
        directory=directory.path,
        log=log,
        note=progress.note,
        waiting=partial(clock.phase, "evaluation"),
        deferred=guard.deferred,
    )


def _arguments_of_run(recipe: Recipe) -> Iterator[str]:
    """Yield the recipe's arguments of `rlcore serve`."""
    if recipe.generator.name != "auto":
        yield from ("--generator", recipe.generator.name)
    if recipe.run.device != "auto":
        yield f'run.device="{recipe.run.device}"'
    if recipe.model.dtype != "auto":
        yield f'model.dtype="{recipe.model.dtype}"'
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code=true"
