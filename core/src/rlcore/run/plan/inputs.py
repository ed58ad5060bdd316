"""Tokenizer, data and environment runner: what a run reads, checked whole before any backend is built."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
from attrs import frozen

from rlcore.config.data import DataConfig
from rlcore.config.recipe import Recipe, RolloutConfig
from rlcore.model_files import config_number
from rlcore.registry.provider_calls import engine_tool_parser, max_concurrent
from rlcore.run.data.curriculum import Curriculum
from rlcore.run.data.examples import Examples
from rlcore.run.data.levels import LEVEL_WINDOW, NO_LEVEL, Levels, levels_of
from rlcore.run.data.mixed_rows import MixedRows, of_set
from rlcore.run.data.prompt_stream import MixedStream, PromptOrder, PromptStream
from rlcore.run.data.rows_digest import RowDigests, rows_digest, sampled
from rlcore.run.data.text import renderer, tokenizers
from rlcore.run.plan.data_sets import DataSet, all_rows, data_sets, examples_of, observer_of, within_limits
from rlcore.run.plan.other_models import check_vocabulary
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.run.plan.truncation import replays_sampling_mask
from rlcore.run.protocols import Source
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.collector import Replay, RolloutCollector
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.from_recipe import collector_of, policy_of
from rlcore.run.rollout.held_out import HeldOutEvaluator
from rlcore.run.rollout.sources import ExampleSource, RolloutSource
from rlcore.run.rollout.turns import OnTokens
from rlcore.spi import DataError, Row, Tokenizer, ToolParser
from rlcore.spi.arrays import Int64Array
from rlcore.spi.execution import GeneratorGroup


@frozen(kw_only=True, eq=False)
class Inputs:
    """Everything that a run reads before its first step."""

    tokenizer: Tokenizer
    tool_parser: ToolParser | None
    episodes: EpisodeRunner | None
    train_sets: Sequence[DataSet]
    train_rows: Sequence[Row]
    train_kept: Int64Array
    """int64 [P]: the rows within the limits."""
    stream: PromptOrder
    """The stream of prompts over the rows that were kept."""
    examples: Examples | None
    """Where the algorithm trains on demonstrations or preferences: those of the kept rows."""
    evaluation_rows: Sequence[Row] | None
    evaluation_kept: Int64Array
    """int64: the held-out rows within the limits."""
    measured: Int64Array
    """int64: those of them that evaluation.max_prompts lets pass, of each data set."""
    measured_sets: Sequence[str] = ()
    """The data set of each of these; none where there is only one."""
    notes: tuple[str, ...] = ()
    """What is odd about the data."""
    held_out: Examples | None = None
    """Held-out rows that the algorithm measures, within the limits; None where there are none."""
    train_levels: Int64Array | None = None
    """int64 [train_kept]: the levels of the rows to train on; None where rows of all levels come."""

    def train_digests(self) -> RowDigests:
        """What the rows to train on hold: all of them gone through, but of those that an environment makes."""
        own = [one for one in self.train_sets if one.config.source == "environment"]
        read = [one for one in self.train_sets if one.config.source != "environment"]
        return RowDigests(
            read=rows_digest(of_set(row, one.name) for one in read for row in one.rows) if read else None,
            own=rows_digest(of_set(row, one.name) for one in own for row in sampled(one.rows)) if own else None,
        )

    @property
    def left_out(self) -> Iterator[str]:
        """How many rows of each split are over the limits."""
        for split, rows, kept in (
            ("train", self.train_rows, self.train_kept),
            ("evaluation", self.evaluation_rows or (), self.evaluation_kept),
        ):
            if len(kept) < len(rows):
                yield f"data.{split}: {len(rows) - len(kept):,} of {len(rows):,} rows are over the limits and left out"

    def source(
        self,
        plan: RunPlan,
        generator: GeneratorGroup | None,
        clock: PhaseClock,
        progress: Progress,
        replay: Replay | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Source:
        """The source of the steps' samples; `replay` repeats a run of this recipe.
        `on_tokens` is called with the tokens and images of each sample as soon as they are all there, in any thread."""
        recipe = plan.recipe
        if self.examples is not None:
            rows = self.train_rows
            names_of = rows.names_of if isinstance(rows, MixedRows) else None
            return ExampleSource(examples=self.examples, stream=self.stream, names_of=names_of)
        assert generator is not None
        assert self.episodes is not None
        collector = collector_of(
            recipe,
            "train",
            generator,
            self.episodes,
            self.tokenizer,
            self.tool_parser,
            clock,
            progress,
            sampling_mask=replays_sampling_mask(recipe, plan.algorithm.needs),
            on_tokens=on_tokens,
            compares=plan.algorithm.needs.compares,
        )
        if replay is not None:
            assert isinstance(collector, RolloutCollector), "no replay repeats agents"
            collector = replay.collector(collector)
        return RolloutSource(
            collector=collector,
            rows=self.train_rows,
            kept=self.train_kept,
            stream=self._curriculum(recipe.data) or self.stream,
            seed=recipe.run.seed,
            policy=policy_of(recipe),
            restarts=recipe.async_.partial_rollouts == "restart",
            overlaps=plan.overlaps,
            replay=replay,
        )

    def _curriculum(self, data: DataConfig) -> Curriculum | None:
        """The order of prompts by what was learned of them; None where it does not matter."""
        if data.curriculum_threshold is None:
            return None if data.zero_variance_weight == 1.0 else Curriculum(self.stream, data.zero_variance_weight)
        assert self.train_levels is not None
        levels = Levels(self.train_levels, data.curriculum_threshold, data.level_window or LEVEL_WINDOW)
        return Curriculum(self.stream, data.zero_variance_weight, levels)

    def evaluator(
        self, recipe: Recipe, generator: GeneratorGroup | None, clock: PhaseClock, progress: Progress
    ) -> HeldOutEvaluator | None:
        """What measures the held-out set; None where there is none, or nothing generates."""
        if generator is None or self.episodes is None or self.evaluation_rows is None:
            return None
        return HeldOutEvaluator(
            collector=collector_of(
                recipe, "evaluation", generator, self.episodes, self.tokenizer, self.tool_parser, clock, progress
            ),
            rows=self.evaluation_rows,
            kept=self.measured,
            seed=recipe.run.seed,
            ks=sorted({*recipe.evaluation.pass_at_k} - {1}),
            with_bounds=recipe.evaluation.confidence_bounds,
        )


@contextmanager
def load_inputs(prepared: RunPlan, tokenizer: Tokenizer | None = None) -> Iterator[Inputs]:
    """Read and check all data; the environment's event loop stops at the end."""
    recipe = prepared.recipe
    tokenizer = tokenizer or tokenizers().load_tokenizer(recipe.model)
    prepared.algorithm.vocab_size = vocab_size = tokenizer.vocab_size or config_number(recipe.model.path, "vocab_size")
    check_vocabulary(recipe, tokenizer)
    episodes = _episodes(prepared, vocab_size)
    try:
        tool_parser = _tool_parser(prepared, tokenizer)
        observe = observer_of(prepared, episodes, reads_calls=tool_parser is not None)
        train_sets = data_sets(prepared, "train")
        examples = None
        if prepared.algorithm.needs.source != "rollouts":
            examples = examples_of(prepared, train_sets, tokenizer)
            train_kept = examples.rows
        else:
            train_kept = within_limits(prepared, train_sets, tokenizer, observe)
        train_rows = all_rows(train_sets)
        evaluation_rows, evaluation_kept, measured = None, np.zeros(0, np.int64), np.zeros(0, np.int64)
        held_out, sets = None, list[DataSet]()
        if recipe.data.evaluation is not None and (prepared.measures_examples or prepared.environment is not None):
            sets = data_sets(prepared, "evaluation")
            evaluation_rows = all_rows(sets)
            if prepared.measures_examples:
                held_out = examples_of(prepared, sets, tokenizer)
                evaluation_kept = held_out.rows
            else:
                evaluation_kept = within_limits(prepared, sets, tokenizer, observe)
            of_sets = np.split(evaluation_kept, np.searchsorted(evaluation_kept, [one.first for one in sets[1:]]))
            measured = np.concatenate([kept[: recipe.evaluation.max_prompts] for kept in of_sets])
        notes: tuple[str, ...] = ()
        if evaluation_rows is not None and not _only_measured(prepared):
            notes = tuple(_overlap(recipe.data, _taken(train_rows, train_kept), _taken(evaluation_rows, measured)))
        levels = None if recipe.data.curriculum_threshold is None or prepared.evaluating else levels_of(train_rows, train_kept)
        if levels is not None:
            notes += tuple(_few_open(levels, recipe.training.prompts_per_step))
        yield Inputs(
            tokenizer=tokenizer,
            tool_parser=tool_parser,
            episodes=episodes,
            train_sets=train_sets,
            train_rows=train_rows,
            train_kept=train_kept,
            stream=_order(recipe, train_sets, train_kept),
            examples=examples,
            evaluation_rows=evaluation_rows,
            evaluation_kept=evaluation_kept,
            measured=measured,
            measured_sets=evaluation_rows.names_of(measured) if isinstance(evaluation_rows, MixedRows) else (),
            notes=(*notes, *(note for one in (*train_sets, *sets) for note in one.notes)),
            held_out=held_out,
            train_levels=levels,
        )
    finally:
        if episodes is not None:
            episodes.close()


def _few_open(levels: Int64Array, prompts_per_step: int) -> Iterator[str]:
    """A note where rows are asked for several times in a step, though there are others that wait."""
    is_open = levels <= levels[levels != NO_LEVEL].min()
    if (num_open := int(is_open.sum())) < min(prompts_per_step, len(levels)):
        yield (
            f"data.curriculum_threshold: {num_open:,} rows are open at first, of {len(levels):,}; training.prompts_per_step "
            f"{prompts_per_step:,} asks for some of them several times in a step. Add rows of the lowest level, or lower it"
        )


def _order(recipe: Recipe, sets: Sequence[DataSet], kept: Int64Array) -> PromptOrder:
    """The order of the kept rows, which are numbered from 0."""
    train = recipe.data.train
    options: dict[str, Any] = {
        "num_rows": len(kept),
        "batch_size": recipe.training.prompts_per_step,
        "seed": recipe.run.seed,
        "shuffle": train.shuffle,
    }
    if train.mix is None:
        return PromptStream(**options)
    bounds = np.searchsorted(kept, [*(one.first for one in sets), sets[-1].first + len(sets[-1].rows)])
    weights = tuple(rows.weight for rows in train.mix.values())
    return MixedStream(sizes=tuple(np.diff(bounds).tolist()), weights=weights, **options)


def _episodes(prepared: RunPlan, vocab_size: int | None) -> EpisodeRunner | None:
    if prepared.environment is None:
        return None
    recipe, entries = prepared.recipe, prepared.environments
    most = [number for entry in entries if (number := max_concurrent(entry, plugin_config(recipe, entry))) is not None]
    return EpisodeRunner(
        prepared.environment,
        recipe.rollout.environment_timeout_s,
        recipe.rollout.on_environment_error,
        ", ".join(entry.label for entry in entries),
        _concurrency(recipe.rollout, min(most, default=None)),
        vocab_size,
        prepared.runs_agents,
    )


def _concurrency(rollout: RolloutConfig, most: int | None) -> int | None:
    """Calls at once: as the recipe says, as far as the environment can work on so many."""
    if most is None or rollout.environment_concurrency is None:
        return rollout.environment_concurrency or most
    return min(most, rollout.environment_concurrency)


def _tool_parser(prepared: RunPlan, tokenizer: Tokenizer) -> ToolParser | None:
    """What reads the calls of tools in turns, by the recipe."""
    if prepared.environment is None or (entry := prepared.chosen.get("generator")) is None:
        return None
    engine = partial(engine_tool_parser, entry, prepared.model)
    return renderer().tool_parser(prepared.recipe.rollout.tool_parser, tokenizer.chat_template, engine)


def _only_measured(prepared: RunPlan) -> bool:
    """Return whether a program measures rows that stand in for those to train on, which it need not have."""
    given = prepared.given_rows
    return prepared.evaluating and "train" in given and given["train"] is given.get("evaluation")


def _taken(rows: Sequence[Row], numbers: Int64Array) -> Iterable[Row]:
    """Some of the rows, in order, gone through as a whole: that is faster than to take each by its number."""
    wanted = np.zeros(len(rows), np.bool_)
    wanted[numbers] = True
    return compress(rows, wanted.tolist())


def _overlap(data: DataConfig, train: Iterable[Row], evaluation: Iterable[Row]) -> Iterator[str]:
    """A note where held-out prompts are trained on too; DataError where the recipe wants none. Both are the rows in use."""
    held_out = Counter(map(_prompt_key, evaluation))
    number = sum(held_out[key] for key in held_out.keys() & set(map(_prompt_key, train)))
    if number == 0:
        return
    found = f"data.evaluation: {number} of {held_out.total()} held-out prompts are in data.train too"
    if data.on_overlap == "error":
        raise DataError(f"{found}; expected none (data.on_overlap). Take them out of one of the two")
    yield f"{found}, so that evaluations measure what was trained on"


def _prompt_key(row: Row) -> str:
    """What a row asks, as text; the whole row where only the environment makes a prompt of it."""
    prompt = row.get("prompt")
    return (
        prompt if isinstance(prompt, str) else json.dumps(dict(row) if prompt is None else prompt, sort_keys=True, default=str)
    )
