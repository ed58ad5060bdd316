"""Finds the checkpoint that a run resumes from, and checks that it fits the recipe."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rlcore.reading import read_toml
from rlcore.registry.algorithm_handle import AlgorithmHandle, AlgorithmState
from rlcore.run.data.rows_digest import RowDigests
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopPosition
from rlcore.run.storage.checkpoint import (
    LoopState,
    list_checkpoints,
    newest_checkpoint,
    read_loop_state,
    require_intact,
    state_for,
)
from rlcore.run.storage.recipe_changes import Change, recipe_changes
from rlcore.run.storage.run_directory import LAST_SAVED, RunDirectory
from rlcore.run.storage.saver import RunSaver, model_digest
from rlcore.schema.file_limits import read_file
from rlcore.spi import CheckpointError

Note: TypeAlias = Callable[[str], None]
"""Tells the user one line."""


def find_checkpoint(plan: RunPlan, directory: RunDirectory, note: Note, *, resume: bool, allow_changes: bool) -> Path | None:
    """Find the checkpoint to resume from; None for a new run. Nothing is written.

    CheckpointError if a new run finds another in its directory. The same if the recipe of a resumed run with a checkpoint or
    metrics makes it another run, unless `allow_changes`.
    """
    if not resume:
        if directory.metrics_file.exists() or list_checkpoints(directory.checkpoints):
            raise CheckpointError(
                f"{directory.path} already holds a run. Continue it with --resume, choose another run.name, or remove it"
            )
        return None
    checkpoint = newest(directory, note)
    state = None if checkpoint is None else read_loop_state(checkpoint)
    if checkpoint is not None and state is not None:
        check_trainer(plan, checkpoint, state)
    if checkpoint is not None or directory.read_metrics():  # else nothing was made with the recipe before
        _check_changes(plan, directory, state, note, allow_changes)
    if checkpoint is not None and state is not None and plan.critic is not None and state.critic is None:
        raise CheckpointError(
            f"{checkpoint} holds no critic: it was saved by a run whose algorithm trains none, which --allow-changes does not "
            "change. Begin another run with what that one exported as model.path (checkpoint.export), and critic.warmup_steps "
            "for a critic that has learned nothing yet"
        )
    if checkpoint is not None:  # after the recipe, whose algorithm may be another one: then that is the cause
        _, text = state_for(plan.algorithm, checkpoint, allow_changes=allow_changes)
        if text:
            note(text)
    if state is not None and (lost := _lost_steps(directory, state)):
        note(f"{directory.metrics_file} lacks {lost}, which was trained: it was cut. The run goes on without these metrics")
    _check_num_steps(plan.recipe.run.num_steps, 0 if state is None else state.step, directory, note, allow_changes)
    return checkpoint


def _lost_steps(directory: RunDirectory, state: LoopState) -> str:
    """Describe the steps up to the checkpoint's that metrics.jsonl has no line of; "" where it has all."""
    logged = {record["step"] for record in directory.read_metrics()}
    lost = [step for step in range(1, state.step + (state.unlogged is None)) if step not in logged]
    return "" if not lost else f"step {lost[0]}" if len(lost) == 1 else f"{len(lost)} of the steps {lost[0]} to {lost[-1]}"


def _check_num_steps(num_steps: int, saved: int, directory: RunDirectory, note: Note, allow_changes: bool) -> None:
    """Note that no step is left, where the checkpoint has `saved` of `num_steps`. CheckpointError where the run would repeat
    only some of the steps after the checkpoint."""
    done = max((int(record["step"]) for record in directory.read_metrics()), default=0)
    if saved >= num_steps:
        note(f"run.num_steps = {num_steps}, and {saved} steps are done: none is left. Raise it to train on")
    elif num_steps < done and not allow_changes:
        raise CheckpointError(
            f"run.num_steps = {num_steps}, but {directory.metrics_file} has {done} steps, and the newest checkpoint {saved}: "
            f"steps {num_steps + 1} to {done} would be gone. Set run.num_steps to {done} or more, or give --allow-changes too"
        )


def newest(directory: RunDirectory, note: Note) -> Path | None:
    """Return the newest intact checkpoint of the directory's run; None, with a note, if it had not saved one yet.

    CheckpointError if there is no run, or if its checkpoints are gone or damaged.
    """
    if not directory.path.is_dir():
        raise CheckpointError(f"nothing to resume: found no run in {directory.path}; expected run.directory/run.name of one")
    records = directory.read_metrics()  # raises where it is damaged
    checkpoint = newest_checkpoint(directory.checkpoints, note)
    if checkpoint is None and (reason := _had_saved(directory, records)):
        raise CheckpointError(
            f"{directory.checkpoints} holds no checkpoint; expected one to resume from, since {reason}. To begin anew would "
            f"overwrite what is known of the steps so far (metrics.jsonl has {len(records)} lines). Put a checkpoint back, "
            f"remove {directory.path}, or choose another run.name"
        )
    if checkpoint is None:
        note(f"{directory.path} holds no checkpoint yet: the run starts from its beginning")
    return checkpoint


def _had_saved(directory: RunDirectory, records: Sequence[Mapping[str, float]]) -> str:
    """Return the evidence that the run had saved a checkpoint; "" where it need not have.

    A run that ended while it saved the checkpoint of its last step has that step's line, and no summary. A checkpoint may be
    incomplete until the next one is saved.
    """
    if directory.last_saved is not None:
        return f"that of step {directory.last_saved} was saved"
    try:
        options = read_toml(directory.recipe_file)["checkpoint"]
        every, at_end = int(options["every_n_steps"]), bool(options["at_end"])
    except (CheckpointError, ValueError, LookupError, TypeError):
        return ""
    steps, is_complete = int(max((record["step"] for record in records), default=0)), directory.summary_file.exists()
    periodic = every > 0 and (every <= steps if is_complete else 2 * every < steps)
    if not periodic and not (at_end and is_complete):
        return ""
    when = f"every {every} steps" if periodic else "at its end"
    return (
        f"metrics.jsonl has {steps} steps of a run that saved one {when} (recipe.toml). {LAST_SAVED}, which names the newest, "
        "is missing too: `cp -r run/*` leaves hidden files out"
    )


def check_trainer(prepared: RunPlan, checkpoint: Path, state: LoopState) -> None:
    """CheckpointError where a checkpoint is another trainer's, which alone can read it."""
    name = prepared.chosen["trainer"].name
    if state.trainer != name:
        raise CheckpointError(
            f"{checkpoint} was saved by trainer {state.trainer!r}; this run has {name!r}. "
            f"Set trainer.name to {state.trainer!r}, or start a run of another name"
        )


def check_rows(checkpoint: Path, digests: RowDigests, note: Note, *, allow_changes: bool) -> None:
    """Say where the rows to train on are others than those of a checkpoint's run; CheckpointError unless `allow_changes`, or
    they are an environment's own, which its options may change. `digests` are of the rows as they are now."""
    state, digest = read_loop_state(checkpoint), digests.read
    if digests.own is not None and state.own_rows is not None and digests.own != state.own_rows:
        note(
            f"the environment brings other rows to train on than it did when {checkpoint} was saved, so that the run is not "
            "what it would have been. Rows that follow from EnvironmentContext.seed and the options alone stay the same"
        )
    before = state.data
    if before is None or digest is None or before == digest:
        return
    found = f"data.train holds other rows than it did when {checkpoint} was saved (digest {digest:.12}, {before:.12} before)"
    if not allow_changes:
        raise CheckpointError(
            f"{found}; expected the same, from which it follows what comes in which step. Bring them back, choose another "
            "run.name, or add --allow-changes to go on all the same"
        )
    note(found)


def checked_state(plan: RunPlan, checkpoint: Path) -> LoopState:
    """Read the loop's state of a checkpoint; CheckpointError where it is damaged, or another model's or another trainer's."""
    state = read_loop_state(require_intact(checkpoint))
    check_trainer(plan, checkpoint, state)
    changes = model_changes(plan, state)
    if changes:
        what = "; ".join(map(str, changes))
        raise CheckpointError(f"{checkpoint} belongs to another model: {what}. Name the recipe that it was trained with")
    return state


def restore(
    saver: RunSaver,
    algorithm: AlgorithmHandle,
    checkpoint: Path | None,
    *,
    initial_state: AlgorithmState | None,
    allow_changes: bool,
) -> LoopPosition:
    """Go back to a checkpoint, or to the beginning where there is none. `initial_state` is what the algorithm kept then."""
    kept = None if checkpoint is None else state_for(algorithm, checkpoint, allow_changes=allow_changes)[0]
    if (algorithm_state := initial_state if kept is None else kept) is not None:
        algorithm.load_state(algorithm_state)
    if checkpoint is None:
        saver.directory.rewind(-1, last_rollouts=-1)
        return LoopPosition()
    state = read_loop_state(checkpoint)
    saver.load(checkpoint, state)
    # Only what loaded whole may cost the metrics after it. Before the first step, the loop evaluates anew; a step that has no
    # line yet was trained on already, so that its rollouts are not written again.
    logged = state.step - 1 if state.step == 0 or state.unlogged is not None else state.step
    saver.directory.rewind(logged, last_rollouts=state.step)
    return LoopPosition(
        step=state.step,
        saved_step=state.step,
        weight_version=state.weight_version,
        step_version=state.weight_version,
        critic_version=state.critic_version,
        step_critic_version=state.critic_version,
        unlogged=None if state.unlogged is None else dict(state.unlogged),
    )


def model_changes(prepared: RunPlan, state: LoopState) -> list[Change]:
    """Return the differences between the recipe's models and those that the checkpoint's run began with."""
    recipe, changes = prepared.recipe, []
    now_and_before = (
        ("model", recipe.model, state.model),
        ("reference", recipe.reference, state.reference),
        ("critic", prepared.critic, state.critic),
    )
    for key, model, before in now_and_before:
        digest = None if model is None else model_digest(model.path, model.revision)
        if digest != before:
            was = "none" if before is None else f"digest {before:.12}"
            now = "none" if model is None else f"{digest:.12} of another model, {model.path}"
            changes.append(Change(key=f"{key}.path", before=was, after=now))
    return changes


def _check_changes(
    prepared: RunPlan, directory: RunDirectory, state: LoopState | None, note: Note, allow_changes: bool
) -> None:
    """Say what changed in the recipe; CheckpointError where that makes another run."""
    changes = _changes(prepared, directory, note, is_begun=state is not None)
    other_models = [] if state is None else model_changes(prepared, state)
    refused = [change for change in changes if change.makes_another_run] + other_models
    if refused and not allow_changes:
        lines = "".join(f"\n  - {change}" for change in refused)
        raise CheckpointError(
            f"{directory.path} holds another run; this recipe differs from its {directory.recipe_file.name} in what a run "
            f"cannot change:{lines}\nResume with the values before, choose another run.name, or add --allow-changes to go "
            "on all the same"
        )
    reported = [*changes, *other_models]
    if reported:
        note(f"the recipe has changed: {'; '.join(map(str, reported))}")


def _changes(prepared: RunPlan, directory: RunDirectory, note: Note, *, is_begun: bool) -> Sequence[Change]:
    """Return what differs from the recipe that the run had last. One that has a checkpoint `is_begun`, and had a recipe."""
    file, resolved = directory.recipe_file, prepared.resolved
    try:
        return recipe_changes(read_file(file).decode(), resolved)
    except FileNotFoundError:
        if is_begun:
            note(f"{file} is gone, so that nothing is known of changes in the recipe")
        return ()  # killed before it wrote anything, or removed
    except (OSError, ValueError) as error:
        note(f"{file} cannot be read, so that nothing is known of changes in the recipe: {error}")
        return ()
