"""`evaluate`: measure a model, or a checkpoint of it, without training."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from attrs import evolve

from rlcore.registry.generator_handle import OWN_VERSION
from rlcore.run.execution.context import execution
from rlcore.run.execution.in_process import generator_alone
from rlcore.run.execution.weight_sync import weight_sync_of
from rlcore.run.interrupt import InterruptGuard, ended_by_sigterm
from rlcore.run.plan.inputs import Inputs, load_inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.resuming import checked_state
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saver import RunSaver
from rlcore.run.train_step.held_out import HeldOutExamples
from rlcore.spi import ConfigError, Problem, Tokenizer
from rlcore.spi.execution import GeneratorGroup


def evaluate(
    prepared: RunPlan,
    *,
    checkpoint: Path | None,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
    with_bounds: bool = False,
) -> dict[str, float]:
    """Measure the model, or a checkpoint of it, on the recipe's held-out set: pass@1 by its environment, or without one the
    algorithm's own figures. `with_bounds` measures confidence intervals, whatever the recipe says."""
    recipe = prepared.recipe
    if with_bounds:
        recipe = evolve(recipe, evaluation=evolve(recipe.evaluation, confidence_bounds=True))
        prepared = evolve(prepared, recipe=recipe)
    if recipe.data.evaluation is None or not (prepared.environment is not None or prepared.measures_examples):
        raise _nothing_to_evaluate()
    state = None if checkpoint is None else checked_state(prepared, checkpoint)
    clock = PhaseClock(progress)
    with ended_by_sigterm(), load_inputs(prepared, tokenizer) as inputs, ExitStack() as stack:
        for note in (*prepared.registry.warnings, *prepared.notes, *inputs.notes, *inputs.left_out):
            progress.note(note)
        if prepared.answers_alone:
            alone = stack.enter_context(generator_alone(prepared, inputs.tokenizer))
            return _evaluator(inputs, alone, clock, progress)(OWN_VERSION)
        backends = stack.enter_context(stack.enter_context(execution(prepared, inputs.tokenizer, None, progress))())
        version, weights = 0, weight_sync_of(prepared, backends, clock, progress, InterruptGuard())
        if checkpoint is not None and state is not None:
            weights.to_training()  # what is loaded has to be somewhere
            directory = RunDirectory(path=checkpoint.parent.parent)
            saver = RunSaver(plan=prepared, backends=backends, tokenizer=inputs.tokenizer, directory=directory)
            saver.load(checkpoint, state)
            version = state.weight_version
        if inputs.held_out is not None:
            held_out = (inputs.held_out, inputs.measured, prepared.algorithm, backends, inputs.measured_sets)
            return HeldOutExamples.of(*held_out).evaluate(version)
        measure = _evaluator(inputs, backends.generator, clock, progress)
        return weights.generating(lambda: measure(version), version)


def _evaluator(
    inputs: Inputs, generator: GeneratorGroup | None, clock: PhaseClock, progress: Progress
) -> Callable[[int], dict[str, float]]:
    prompts = inputs.held_out_prompts
    if inputs.collector is None or generator is None or prompts is None:
        raise _nothing_to_evaluate()
    return inputs.collector.evaluator(prompts, generator, clock, progress)


def _nothing_to_evaluate() -> ConfigError:
    return ConfigError(
        [
            Problem(
                path="data.evaluation",
                found="no held-out set, or nothing that measures it",
                expected="both, where a model is to be evaluated: an environment, or an algorithm that measures rows itself",
                remedy="Add the sections [data.evaluation] and [environment].",
            )
        ]
    )
