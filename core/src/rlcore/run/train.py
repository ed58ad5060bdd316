"""`train` and `evaluate`: build what a prepared recipe chose, run it, and leave a run directory behind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attrs import evolve, field, frozen

from rlcore.registry.algorithm_handle import AlgorithmState
from rlcore.registry.binding import build_sink
from rlcore.run.data.datasets import Split
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.ending import run_to_end
from rlcore.run.execution.backends import OpenBackends, execution
from rlcore.run.execution.refit import Refitter, first_line
from rlcore.run.execution.residency import Residency
from rlcore.run.interrupt import InterruptGuard, ended_by_sigterm
from rlcore.run.loop import Loop
from rlcore.run.plan.inputs import Inputs, load_inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.run.protocols import Backends, LoopPosition
from rlcore.run.report.progress import Progress, SilentProgress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.summary import summarize
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.collector import RolloutCollector
from rlcore.run.rollout.episode_starts import PromptLimit
from rlcore.run.rollout.sources import DemonstrationSource, HeldOutEvaluator, RolloutSource
from rlcore.run.storage.algorithm_state import state_for
from rlcore.run.storage.checkpoint import LoopState, find_damage, read_loop_state
from rlcore.run.storage.resuming import check_new, check_trainer, find_checkpoint, model_change, newest
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saver import RunSaver, model_digest
from rlcore.spi import (
    CheckpointError,
    ConfigError,
    Problem,
    SamplingParams,
    SinkContext,
    StorageError,
    WorkerError,
    capabilities,
)


def train(
    prepared: RunPlan,
    *,
    resume: bool,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
    allow_changes: bool = False,
) -> dict[str, object]:
    """Run a recipe to its last step and return what summary.json holds.

    `resume` continues the run of the same name from its newest intact checkpoint; without it an existing run is an error.
    `allow_changes` resumes also where the recipe makes another run of it; every change is noted in any case.
    `tokenizer` stands in for the model's own, in tests. Raises InterruptedRun after Ctrl-C, once a checkpoint is saved.
    """
    start = time.perf_counter()
    directory = RunDirectory.of(prepared.recipe.run)
    run = _Run(
        prepared=prepared,
        directory=directory,
        progress=progress,
        start=start,
        allow_changes=allow_changes,
        initial_state=prepared.algorithm.save_state(),
        clock=PhaseClock(progress),
    )
    _ = _find_checkpoint(run, resume, SilentProgress())  # before anything is made there
    with ended_by_sigterm(), load_inputs(prepared, tokenizer) as inputs, directory.locked():
        # Once more: it might have been another's until now.
        checkpoint = _find_checkpoint(run, resume, progress)
        run = evolve(run, prepared=prepared.observed(directory.path))
        _say_notes(prepared, inputs, progress)
        if not resume:
            _begin(prepared, directory, 0)
        with (
            _open_sinks(prepared, directory.path, progress) as sinks,
            execution(run.prepared, inputs.tokenizer, directory.logs, progress) as opened,
        ):
            summary = sinks.summary = _run_with_restarts(run, inputs, sinks, opened, resume, checkpoint)
    progress.finished(summary)
    return summary


@contextmanager
def _open_sinks(prepared: RunPlan, directory: Path, progress: Progress) -> Iterator[Sinks]:
    """The recipe's sinks, closed however the run ends. What one raises while it is built passes through."""
    sinks = Sinks(progress)
    context = SinkContext(run_directory=directory.absolute(), run_name=prepared.recipe.run.name, recipe=prepared.resolved)
    try:
        for entry in prepared.sinks:
            sinks.add(entry.label, build_sink(entry, context, plugin_config(prepared.recipe, entry)))
        yield sinks
    finally:
        sinks.close()


@frozen(kw_only=True, eq=False)
class _Run:
    """What stays the same however often the workers are started anew."""

    prepared: RunPlan
    directory: RunDirectory
    progress: Progress
    start: float
    """When it began, by time.perf_counter."""
    allow_changes: bool
    """Whether a recipe that makes another run may be resumed with."""
    initial_state: AlgorithmState | None
    """What the algorithm keeps before the first step; None where it keeps nothing."""
    clock: PhaseClock
    guard: InterruptGuard = field(factory=InterruptGuard)


def _run_with_restarts(
    run: _Run, inputs: Inputs, sinks: Sinks, opened: OpenBackends, resume: bool, checkpoint: Path | None
) -> dict[str, object]:
    """Run to the end. Workers that die or hang are started anew, and the run goes on from its newest checkpoint."""
    cluster = run.prepared.recipe.cluster
    max_restarts = 0 if cluster is None else cluster.max_restarts
    cause: WorkerError | None = None
    for restart in range(1, max_restarts + 2):
        try:
            with opened() as backends:
                return _run_once(run, inputs, sinks, backends, resume, checkpoint)
        except ConfigError as error:
            if cause is not None:
                error.add_note(f"The workers were to be started anew, since: {first_line(cause)}")
            raise
        except WorkerError as error:
            if restart > max_restarts or run.guard.pressed:
                if restart > max_restarts > 0:
                    error.add_note(f"The workers had been started anew {max_restarts} times (cluster.max_restarts).")
                raise
            run.progress.note(f"restart {restart} of {max_restarts}, from the newest checkpoint: {first_line(error)}")
            cause, resume = error, True
            checkpoint = newest(run.directory, run.progress.note)  # of this very run: its recipe is looked at no more
    raise AssertionError("unreachable: the last attempt returns or raises")


def _run_once(
    run: _Run, inputs: Inputs, sinks: Sinks, backends: Backends, resume: bool, checkpoint: Path | None
) -> dict[str, object]:
    """From a checkpoint, or the beginning, to the end."""
    prepared, directory, progress = run.prepared, run.directory, run.progress
    saver = _saver(prepared, inputs, backends, directory)
    loop = _build_loop(run, inputs, sinks, backends, saver)
    if resume:
        _restore(run, loop, saver, checkpoint)
        _begin(prepared, directory, loop.position.step)
    run.clock.totals.setdefault("setup", time.perf_counter() - run.start)
    progress.started(directory.path, loop.position.step, prepared.recipe.run.num_steps)
    run_to_end(loop, saver)
    try:
        return _finish(loop, saver, prepared, time.perf_counter() - run.start)
    except (StorageError, CheckpointError) as error:
        error.add_note("All steps are done; --resume writes what is missing.")
        raise


def evaluate(
    prepared: RunPlan, *, checkpoint: Path | None, progress: Progress, tokenizer: Tokenizer | None = None
) -> dict[str, float]:
    """pass@1 of the model, or of a checkpoint of it, on the recipe's held-out set."""
    recipe = prepared.recipe
    if prepared.environment is None or recipe.data.evaluation is None:
        raise _nothing_to_evaluate()
    state = None if checkpoint is None else _checked_state(prepared, checkpoint)
    clock = PhaseClock(progress)
    prepared = prepared.observed(None)
    with (
        ended_by_sigterm(),
        load_inputs(prepared, tokenizer) as inputs,
        execution(prepared, inputs.tokenizer, None, progress) as opened,
        opened() as backends,
    ):
        _say_notes(prepared, inputs, progress)
        version = 0
        if checkpoint is not None and state is not None:
            _saver(prepared, inputs, backends, RunDirectory(path=checkpoint.parent.parent)).load(checkpoint, state)
            version = state.weight_version
        refitter = _refitter(prepared, backends, progress)
        evaluator = _evaluator(prepared, inputs, backends, clock, progress)
        if refitter is None or evaluator is None:
            raise _nothing_to_evaluate()
        refit, residency = partial(refitter.refit, version), _residency(prepared, backends, clock)
        bring = refit if residency is None else partial(residency.to_generation, refit)
        return refitter.generating(partial(evaluator.evaluate, version), bring, lambda: None)


def _say_notes(prepared: RunPlan, inputs: Inputs, progress: Progress) -> None:
    """What is odd about plugins and data."""
    for note in (*prepared.registry.warnings, *prepared.notes, *inputs.notes):
        progress.note(note)


def _nothing_to_evaluate() -> ConfigError:
    return ConfigError(
        [
            Problem(
                path="data.evaluation",
                found="no held-out set, or no environment that scores it",
                expected="both, where a model is to be evaluated",
                remedy="Add the sections [data.evaluation] and [environment].",
            )
        ]
    )


def _find_checkpoint(run: _Run, resume: bool, progress: Progress) -> Path | None:
    """The checkpoint to resume from, or None for a new run."""
    if not resume:
        check_new(run.directory)
        return None
    return find_checkpoint(run.prepared, run.directory, progress.note, allow_changes=run.allow_changes)


def _checked_state(prepared: RunPlan, checkpoint: Path) -> LoopState:
    """CheckpointError where a checkpoint is damaged, or another model's or another trainer's."""
    damage = find_damage(checkpoint)
    if damage is not None:
        raise CheckpointError(f"{checkpoint} is no intact checkpoint: {damage}. Name a folder checkpoints/step-N of a run")
    state = read_loop_state(checkpoint)
    check_trainer(prepared, checkpoint, state)
    change = model_change(prepared, state)
    if change is not None:
        raise CheckpointError(f"{checkpoint} belongs to another model: {change}. Name the recipe that it was trained with")
    return state


def _begin(prepared: RunPlan, directory: RunDirectory, step: int) -> None:
    """Write down what runs from now on, after `step` steps."""
    distributions = [entry.distribution for entry in (*prepared.chosen.values(), *prepared.sinks)]
    directory.begin(prepared.resolved, distributions, step)


def _build_loop(run: _Run, inputs: Inputs, sinks: Sinks, backends: Backends, saver: RunSaver) -> Loop:
    prepared, progress, clock = run.prepared, run.progress, run.clock
    return Loop(
        recipe=prepared.recipe,
        algorithm=prepared.algorithm,
        trainer=backends.trainer,
        source=_source(prepared, inputs, backends, clock, progress),
        refitter=_refitter(prepared, backends, progress),
        residency=_residency(prepared, backends, clock),
        evaluator=_evaluator(prepared, inputs, backends, PhaseClock(progress), progress) if prepared.recipe.evaluates else None,
        saver=saver,
        sinks=sinks,
        progress=progress,
        clock=clock,
        guard=run.guard,
        position=LoopPosition(),
    )


def _source(
    prepared: RunPlan, inputs: Inputs, backends: Backends, clock: PhaseClock, progress: Progress
) -> RolloutSource | DemonstrationSource:
    if inputs.demonstrations is not None:
        return DemonstrationSource(demonstrations=inputs.demonstrations, stream=inputs.stream)
    return RolloutSource(
        collector=_collector(prepared, inputs, backends, clock, progress, evaluation=False),
        rows=inputs.train_rows,
        kept=inputs.train_kept,
        stream=inputs.stream,
        seed=prepared.recipe.run.seed,
    )


def _evaluator(
    prepared: RunPlan, inputs: Inputs, backends: Backends, clock: PhaseClock, progress: Progress
) -> HeldOutEvaluator | None:
    if backends.generator is None or inputs.evaluation_rows is None:
        return None
    return HeldOutEvaluator(
        collector=_collector(prepared, inputs, backends, clock, progress, evaluation=True),
        rows=inputs.evaluation_rows,
        kept=inputs.measured,
        seed=prepared.recipe.run.seed,
    )


def _collector(
    prepared: RunPlan, inputs: Inputs, backends: Backends, clock: PhaseClock, progress: Progress, *, evaluation: bool
) -> RolloutCollector:
    recipe = prepared.recipe
    rollout, options = recipe.rollout, recipe.evaluation if evaluation else recipe.rollout
    stops = inputs.tokenizer.stop_token_ids if rollout.stop_token_ids is None else rollout.stop_token_ids
    assert backends.generator is not None
    assert inputs.episodes is not None
    split: Split = "evaluation" if evaluation else "train"
    data = getattr(recipe.data, split)
    return RolloutCollector(
        generator=backends.generator,
        episodes=inputs.episodes,
        tokenizer=inputs.tokenizer,
        sampling=SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop_token_ids=stops,
            stop_strings=rollout.stop_strings,
        ),
        samples_per_prompt=options.samples_per_prompt,
        prompt_limit=PromptLimit(
            max_tokens=rollout.max_prompt_tokens, drops=data.on_long_prompt == "drop", key=f"data.{split}"
        ),
        max_response_tokens=rollout.max_response_tokens,
        max_turns=rollout.max_turns,
        max_failed_fraction=rollout.max_failed_fraction,
        purpose="the evaluation" if evaluation else "the step",
        routed_experts=rollout.replay_routing and not evaluation,
        clock=clock,
        progress=progress,
    )


def _refitter(prepared: RunPlan, backends: Backends, progress: Progress) -> Refitter | None:
    if backends.generator is None or backends.route is None or prepared.channel is None:
        return None
    return Refitter(
        route=backends.route,
        generator=backends.generator,
        channel=prepared.channel,
        dtype=prepared.model.dtype,
        max_bucket_bytes=prepared.recipe.refit.max_bucket_mib * 2**20,
        max_attempts=prepared.recipe.refit.max_attempts,
        progress=progress,
    )


def _residency(prepared: RunPlan, backends: Backends, clock: PhaseClock) -> Residency | None:
    """Where the two share a GPU's memory and the recipe wants them to take turns."""
    options, trainer, generator = prepared.recipe.residency, backends.trainer, backends.generator
    if generator is None or not prepared.shares_devices:
        return None
    sleeps = options.generator_sleeps and generator.has(capabilities.RESIDENCY)
    moves = trainer.has(capabilities.RESIDENCY)
    offloads = options.offload_trainer if moves else "none"
    if not sleeps and offloads == "none":
        return None
    return Residency(
        trainer=trainer,
        generator=generator,
        generator_sleeps=sleeps,
        offload_trainer=offloads,
        trainer_moves=moves,
        clock=clock,
        turn="generation" if offloads == "none" else None,
        metrics={},
    )


def _saver(prepared: RunPlan, inputs: Inputs, backends: Backends, directory: RunDirectory) -> RunSaver:
    return RunSaver(
        directory=directory,
        trainer=backends.trainer,
        generator=backends.generator,
        tokenizer=inputs.tokenizer,
        model=model_digest(prepared.recipe.model.path, prepared.recipe.model.revision),
        trainer_name=prepared.chosen["trainer"].name,
        algorithm_name=prepared.chosen["algorithm"].name,
        keep=prepared.recipe.checkpoint.keep,
    )


def _restore(run: _Run, loop: Loop, saver: RunSaver, checkpoint: Path | None) -> None:
    """Go back to a checkpoint, or to the beginning where there is none."""
    kept = None if checkpoint is None else state_for(loop.algorithm, checkpoint, allow_changes=run.allow_changes)[0]
    if (algorithm_state := run.initial_state if kept is None else kept) is not None:
        loop.algorithm.load_state(algorithm_state)
    if checkpoint is None:
        saver.directory.rewind(-1, last_rollouts=-1)
        return
    state = read_loop_state(checkpoint)
    saver.load(checkpoint, state)
    # Only what loaded whole may cost the metrics after it. Before the first step, the loop evaluates anew; a step that has no
    # line yet was trained on already, so that its rollouts are not written again.
    logged = state.step - 1 if state.step == 0 or state.unlogged is not None else state.step
    saver.directory.rewind(logged, last_rollouts=state.step)
    position = loop.position
    position.step = position.saved_step = state.step
    position.weight_version = position.step_version = state.weight_version
    position.unlogged = None if state.unlogged is None else dict(state.unlogged)


def _finish(loop: Loop, saver: RunSaver, prepared: RunPlan, total_s: float) -> dict[str, object]:
    """What follows the last step: the exported model and summary.json."""
    recipe, directory = prepared.recipe, saver.directory
    model = saver.export_model() if recipe.checkpoint.export == "hf" else None
    records = directory.read_metrics()
    summary = {
        "name": recipe.run.name,
        "run_directory": str(directory.path),
        "seed": recipe.run.seed,
        **summarize(records),
        "total_s": total_s,
        "setup_s": loop.clock.totals["setup"],
        "evaluation_s": loop.clock.totals["evaluation"],
        "checkpoint_s": loop.clock.totals["checkpoint"],
        "model": None if model is None else str(model),
    }
    directory.write_summary(summary)
    return summary
