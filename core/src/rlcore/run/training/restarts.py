"""Runs the loop to its end, and from the newest checkpoint where workers died or hung."""

import time
from pathlib import Path

from rlcore.registry.plugin_errors import first_line
from rlcore.run.execution.weight_sync import weight_sync_of
from rlcore.run.protocols import LoopPosition
from rlcore.run.storage.resuming import newest, restore
from rlcore.run.storage.saver import RunSaver
from rlcore.run.training.ending import finish, run_to_end
from rlcore.run.training.loop_of_run import TrainingRun, critic_of
from rlcore.spi import ConfigError, WorkerError
from rlcore.spi.execution import Backends, EngineLimitError, OpenBackends


def run_with_restarts(run: TrainingRun, opened: OpenBackends, resume: bool, checkpoint: Path | None) -> dict[str, object]:
    """Run to the end. Workers that die or hang are started anew, and the run goes on from its newest checkpoint."""
    cluster = run.plan.recipe.cluster
    max_restarts = 0 if cluster is None else cluster.max_restarts
    cause: WorkerError | None = None
    for restart in range(1, max_restarts + 2):
        try:
            with opened() as backends:
                return _run_once(run, backends, resume, checkpoint)
        except ConfigError as error:
            if cause is None:
                raise
            # The recipe has worked before: what it asks for is not there any more.
            problems = "\n".join(f"  - {problem}" for problem in error.problems)
            raise WorkerError(
                f"the workers could not be started anew:\n{problems}\nThey were to be, since: {first_line(cause)}"
            ) from error
        except WorkerError as error:
            if restart > max_restarts or run.guard.pressed or isinstance(error, EngineLimitError):
                if restart > max_restarts > 0:
                    error.add_note(f"The workers had been started anew {max_restarts} times (cluster.max_restarts).")
                raise
            run.progress.note(f"restart {restart} of {max_restarts}, from the newest checkpoint: {first_line(error)}")
            cause, resume = error, True
            checkpoint = newest(run.directory, run.progress.note)  # of this very run: its recipe is looked at no more
    raise AssertionError("unreachable: the last attempt returns or raises")


def _run_once(run: TrainingRun, backends: Backends, resume: bool, checkpoint: Path | None) -> dict[str, object]:
    """Run the loop from a checkpoint, or from the beginning, to its end."""
    prepared, directory, progress = run.plan, run.directory, run.progress
    for observer in run.observers:
        backends = observer.on_backends(backends)
    saver = RunSaver(plan=prepared, backends=backends, tokenizer=run.inputs.tokenizer, directory=directory, digests=run.digests)
    position, critic = LoopPosition(), critic_of(prepared, backends, run.clock)
    weights = weight_sync_of(prepared, backends, run.clock, progress, run.guard, critic)
    if resume:
        weights.to_training()  # what is loaded has to be somewhere
        position = restore(
            saver, prepared.algorithm, checkpoint, initial_state=run.initial_state, allow_changes=run.allow_changes
        )
        directory.begin(prepared, position.step)
    with run.loop(saver, backends, weights, critic, position, checkpoint if resume else None) as loop:
        run.clock.totals.setdefault("setup", time.perf_counter() - run.start)
        progress.started(directory.path, position.step, prepared.recipe.run.num_steps)
        run_to_end(loop, directory)
    return finish(loop, saver, time.perf_counter() - run.start)
