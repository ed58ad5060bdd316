"""Ends a run, after its last step, Ctrl-C or an error, and saves what is complete."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlcore.run.loop import Loop
from rlcore.run.protocols import LoopObserver
from rlcore.run.report.metrics_file import summarize
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saver import RunSaver
from rlcore.spi import CheckpointError, InterruptedRun, NonFiniteError, StorageError


def run_to_end(loop: Loop, directory: RunDirectory) -> None:
    """The loop to its end; on Ctrl-C or SIGTERM a checkpoint, then InterruptedRun; on an error a checkpoint, then the error."""
    try:
        with loop.guard.entered():
            loop.run()
            with loop.clock.phase("checkpoint"):
                loop.await_checkpoint()
    except KeyboardInterrupt as interrupt:
        raise _interrupted(loop, directory.checkpoints) from interrupt
    except Exception as error:
        if note := _save_what_is_whole(loop, directory.checkpoints, error):
            error.add_note(note)
        raise


def finish(loop: Loop, saver: RunSaver, total_s: float) -> dict[str, object]:
    """Export the model and write summary.json after the last step. Return the content of summary.json."""
    recipe, directory, totals = loop.recipe, saver.directory, loop.clock.totals
    exports_critic = recipe.critic is not None and recipe.critic.export
    if exports_critic or recipe.checkpoint.export != "none":
        loop.weights.make_room_to_save()
    with _after_the_last_step():
        if exports_critic:
            saver.export_critic()
        model = None if recipe.checkpoint.export == "none" else saver.export_model(recipe.checkpoint.export)
        summary = {
            "name": recipe.run.name,
            "run_directory": str(directory.path),
            "seed": recipe.run.seed,
            **summarize(directory.read_metrics()),
            "total_s": total_s,
            "setup_s": totals["setup"],
            "evaluation_s": totals["evaluation"],
            "checkpoint_s": totals["checkpoint"],
            "model": None if model is None else str(model),
        }
        directory.write_summary(summary)
    return summary


def complete(observers: Sequence[LoopObserver], summary: Mapping[str, object]) -> None:
    """Let the observers add to what the run leaves behind, once the sinks are closed."""
    with _after_the_last_step():
        for observer in observers:
            observer.on_export(summary)


@contextmanager
def _after_the_last_step() -> Iterator[None]:
    try:
        yield
    except (StorageError, CheckpointError) as error:
        error.add_note("All steps are done; --resume writes what is missing.")
        raise


def _interrupted(loop: Loop, checkpoints: Path) -> InterruptedRun:
    """Save a checkpoint where the state is whole, and say how to go on."""
    step = loop.position.step
    if loop.guard.torn:
        torn = step if loop.position.unlogged is not None else step + 1
        return InterruptedRun(
            f"stopped at once, in the middle of step {torn}; nothing of it was saved. "
            "--resume continues from the newest checkpoint."
        )
    try:
        loop.await_checkpoint()
        if loop.position.saved_step != step and not loop.saver.can_save:
            return InterruptedRun(
                f"stopped after step {step}, in the midst of a call after which the state of trainer or generator is not "
                "known; nothing was saved. --resume continues from the newest checkpoint."
            )
        if loop.position.saved_step != step:
            loop.save()
            loop.await_checkpoint()
    except KeyboardInterrupt:
        return InterruptedRun(
            f"stopped at once, before the checkpoint of step {step} was saved. --resume continues from the newest checkpoint."
        )
    return InterruptedRun(
        f"stopped after step {step}; its checkpoint is in {checkpoints}. Continue with the same command and --resume."
    )


def _save_what_is_whole(loop: Loop, checkpoints: Path, error: Exception) -> str:
    """Save the state that an error left, beside all earlier checkpoints; a line on where to go on from, if anywhere.

    An update that was refused as not finite is known to have changed nothing, so the updates before it are kept even where
    they are not a whole step; after any other error only whole steps are.
    """
    position = loop.position
    is_certain = position.is_whole or isinstance(error, NonFiniteError)
    may_save = loop.saver.can_save and is_certain and position.step > 0 and not isinstance(error, StorageError)
    earlier = ""
    try:
        try:
            loop.await_checkpoint()
        except StorageError as failure:  # of the last checkpoint, which says nothing of the present state
            earlier = f"{failure}\n"
        if may_save and position.saved_step != position.step:
            loop.save(prune=False)
            loop.await_checkpoint()
    except Exception as failure:
        return f"{earlier}The state after step {position.step} could not be saved either: {failure}"
    except KeyboardInterrupt:
        return f"{earlier}The state after step {position.step} was not saved: stopped at once."
    if position.saved_step < 0:
        return earlier.rstrip()
    path = checkpoints / f"step-{position.saved_step:06d}"
    where = f"{earlier}The state after step {position.saved_step} is in {path}; --resume continues from there."
    if isinstance(error, NonFiniteError):
        where += " Should that fail again, change the recipe, or remove that folder to continue from the checkpoint before it."
    return where
