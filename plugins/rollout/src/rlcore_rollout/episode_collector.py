"""Collects the samples of a run by episodes between generator and environment."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from rlcore.config.data import LEVEL_WINDOW, DataConfig, Split
from rlcore.config.recipe import RolloutConfig
from rlcore.registry.provider_calls import engine_tool_parser, max_concurrent
from rlcore.run.data.text import renderer
from rlcore.run.plan.algorithm_rules import replays_sampling_mask
from rlcore.run.plan.collector import Collector, CollectorContext, LoopContext, PromptRows
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.run.protocols import LoopObserver, Source
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.scorers import OnTokens
from rlcore.spi import DataError, Observation, Row, Tokenizer, ToolParser
from rlcore.spi.arrays import Int64Array
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.curriculum import Curriculum
from rlcore_rollout.environment_results import Failure
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.evaluation import AnswerObserver, HeldOutEvaluator
from rlcore_rollout.from_recipe import episode_options, policy_of, step_options
from rlcore_rollout.levels import NO_LEVEL, Levels, levels_of
from rlcore_rollout.prompt_groups import no_parser
from rlcore_rollout.prompt_weights import prompt_weights
from rlcore_rollout.rollout_files import LedgerFiles, RolloutFiles, RolloutWriter
from rlcore_rollout.sampler import EpisodeSampler, Replay, StepSampler
from rlcore_rollout.sources import RolloutSource


class EpisodeCollector(Collector):
    """Collects by the recipe's `[rollout]`, `[async]` and `[evaluation]`."""

    replay: Replay | None = None
    """The run that it repeats; None where it repeats none."""

    def __init__(self, context: CollectorContext) -> None:
        self.plan = context.plan
        self.tokenizer = context.tokenizer
        self.episodes = _runner(context.plan, context.vocab_size)
        try:
            self.tool_parser = _tool_parser(context.plan, context.tokenizer)
        except BaseException:
            self.close()  # nobody has the collector that could close the environment
            raise

    def observe(self, rows: Sequence[Row]) -> Sequence[Observation]:
        """See Collector. Where nothing reads calls of tools, prompts may have none."""
        observations = []
        for row, reset in zip(rows, self.episodes.reset_all(rows, [0] * len(rows)), strict=True):
            if isinstance(reset, Failure):
                # Masking is for what fails now and then during a run; a row that cannot even begin is a wrong row.
                raise DataError(f"the environment cannot begin an episode of row {row!r:.200}: {reset.reason}")
            if reset.observation.tools and self.tool_parser is None:
                raise no_parser()
            observations.append(reset.observation)
        return observations

    def check(self, prompts: PromptRows) -> Iterator[str]:
        """See Collector: the levels of the rows, and whether few of them are open at first."""
        recipe = self.plan.recipe
        if recipe.data.curriculum_threshold is not None:
            yield from _few_open(levels_of(prompts.rows, prompts.kept), recipe.training.prompts_per_step)

    def source(self, prompts: PromptRows, loop: LoopContext) -> RolloutSource:
        """See Collector."""
        recipe, needs = self.plan.recipe, self.plan.algorithm.needs
        assert prompts.order is not None, "the rows are trained on"
        return RolloutSource(
            sampler=self.step_sampler(
                "train",
                loop.on_tokens,
                generator=loop.generator,
                clock=loop.clock,
                progress=loop.progress,
                sampling_mask=replays_sampling_mask(recipe, needs),
                compares=needs.compares,
            ),
            rows=prompts.rows,
            kept=prompts.kept,
            stream=self.curriculum(prompts) or prompts.order,
            seed=recipe.run.seed,
            policy=policy_of(recipe),
            restarts=recipe.async_.partial_rollouts == "restart",
            overlaps=self.plan.overlaps,
            replay=self.replay,
        )

    def curriculum(self, prompts: PromptRows) -> Curriculum | None:
        """Return the order of prompts by what was learned of them; None where it does not matter."""
        return _curriculum(self.plan.recipe.data, prompts)

    def observers(self, source: Source, held_out: PromptRows | None, loop: LoopContext) -> Iterable[LoopObserver]:
        """See Collector."""
        recipe, writer = self.plan.recipe, RolloutWriter(directory=loop.directory, tokenizer=self.tokenizer)
        kept = {} if held_out is None else {"rows": held_out.rows, "kept": held_out.kept.tolist()}
        ledger = LedgerFiles(writer=writer, keeps_answers=recipe.logging.evaluation_answers, **kept)
        yield ledger
        if isinstance(source, RolloutSource):
            slowest = self.episodes.slowest
            yield RolloutFiles(plan=self.plan, source=source, writer=writer, sinks=loop.sinks, slowest=slowest)
        if held_out is not None:
            yield AnswerObserver(
                recipe=recipe,
                weights=loop.weights,
                clock=loop.clock,
                evaluator=self._evaluator(held_out, loop.generator, PhaseClock(loop.progress), loop.progress),
                source=source,
                progress=loop.progress,
                keep=ledger.end_evaluation,
            )

    def evaluator(
        self, held_out: PromptRows, generator: GeneratorGroup, clock: PhaseClock, progress: Progress
    ) -> Callable[[int], dict[str, float]]:
        """See Collector."""
        return self._evaluator(held_out, generator, clock, progress).evaluate

    def close(self) -> None:
        """End the environment's event loop."""
        self.episodes.close()

    def step_sampler(self, split: Split, on_tokens: OnTokens | None = None, **parts: Any) -> StepSampler[Any]:
        """Return the sampler of a split's prompts; `parts` are fields of StepSampler that no recipe sets."""
        own = {"episodes": self.episodes, "tokenizer": self.tokenizer, "tool_parser": self.tool_parser}
        return self.build(split, on_tokens, **own, **parts, **step_options(self.plan.recipe, split, self.tokenizer))

    def build(self, split: Split, on_tokens: OnTokens | None, **parts: Any) -> StepSampler[Any]:
        """Build what collects the prompts of a split; `parts` are all fields of StepSampler."""
        return EpisodeSampler(on_tokens=on_tokens, **episode_options(self.plan.recipe, split), **parts)

    def _evaluator(
        self, held_out: PromptRows, generator: GeneratorGroup, clock: PhaseClock, progress: Progress
    ) -> HeldOutEvaluator:
        options = self.plan.recipe.evaluation
        return HeldOutEvaluator(
            sampler=self.step_sampler("evaluation", generator=generator, clock=clock, progress=progress),
            rows=held_out.rows,
            kept=held_out.kept,
            seed=self.plan.recipe.run.seed,
            ks=sorted({*options.pass_at_k} - {1}),
            with_bounds=options.confidence_bounds,
        )


def _runner(plan: RunPlan, vocab_size: int | None) -> EpisodeRunner:
    """Return the runner that calls the plan's environment."""
    recipe, entries = plan.recipe, plan.environments
    most = [number for entry in entries if (number := max_concurrent(entry, plugin_config(recipe, entry))) is not None]
    assert plan.environment is not None, "as CollectorContext says"
    return EpisodeRunner(
        plan.environment,
        recipe.rollout.environment_timeout_s,
        recipe.rollout.on_environment_error,
        ", ".join(entry.label for entry in entries),
        _concurrency(recipe.rollout, min(most, default=None)),
        vocab_size,
    )


def _concurrency(rollout: RolloutConfig, most: int | None) -> int | None:
    """Calls at once: as the recipe says, as far as the environment can work on so many."""
    if most is None or rollout.environment_concurrency is None:
        return rollout.environment_concurrency or most
    return min(most, rollout.environment_concurrency)


def _tool_parser(plan: RunPlan, tokenizer: Tokenizer) -> ToolParser | None:
    """Return the parser of tool calls that the recipe names; None where nothing generates."""
    if (entry := plan.chosen.get("generator")) is None:
        return None
    engine = partial(engine_tool_parser, entry, plan.model)
    return renderer().tool_parser(plan.recipe.rollout.tool_parser, tokenizer.chat_template, engine)


def _few_open(levels: Int64Array, prompts_per_step: int) -> Iterator[str]:
    """A note where rows are asked for several times in a step, though there are others that wait."""
    is_open = levels <= levels[levels != NO_LEVEL].min()
    if (num_open := int(is_open.sum())) < min(prompts_per_step, len(levels)):
        yield (
            f"data.curriculum_threshold: {num_open:,} rows are open at first, of {len(levels):,}; training.prompts_per_step "
            f"{prompts_per_step:,} asks for some of them several times in a step. Add rows of the lowest level, or lower it"
        )


def _curriculum(data: DataConfig, prompts: PromptRows) -> Curriculum | None:
    """The order of prompts by what was learned of them; None where it does not matter."""
    assert prompts.order is not None
    if data.prompt_weights is not None:
        return Curriculum(prompts.order, 1.0, weights=prompt_weights(data.prompt_weights))
    if data.curriculum_threshold is None:
        return None if data.zero_variance_weight == 1.0 else Curriculum(prompts.order, data.zero_variance_weight)
    of_row = levels_of(prompts.rows, prompts.kept)
    levels = Levels(of_row, data.curriculum_threshold, data.level_window or LEVEL_WINDOW)
    return Curriculum(prompts.order, data.zero_variance_weight, levels)
