"""Tokenizer, data and environment runner: what a run reads, checked whole before any backend is built."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress

import numpy as np
from attrs import frozen

from rlcore.chat.tool_calls import ToolParser
from rlcore.config.recipe import DataConfig, DatasetConfig, Recipe, RolloutConfig
from rlcore.model_files import config_number
from rlcore.registry.binding import engine_tool_parser, max_concurrent
from rlcore.run.data.datasets import Split, load_rows
from rlcore.run.data.examples import Examples
from rlcore.run.data.given_rows import given_rows
from rlcore.run.data.learned_chats import are_chats, render_chats
from rlcore.run.data.preferences import render_preferences
from rlcore.run.data.prompt_stream import PromptStream
from rlcore.run.data.prompts import Observe, render_demonstrations, render_prompts
from rlcore.run.data.row_fields import PROMPT
from rlcore.run.data.tokenizer import PretrainedTokenizer, Tokenizer, load_tokenizer
from rlcore.run.plan.reference_check import check_vocabulary
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.truncation import replays_sampling_mask
from rlcore.run.protocols import GeneratorGroup
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.episode_failure import Failure
from rlcore.run.rollout.schedule_record import RecordedSchedule
from rlcore.run.rollout.sources import (
    ExampleSource,
    HeldOutEvaluator,
    RolloutSource,
    Source,
    collector_of,
    policy_of,
)
from rlcore.spi import DataError, Observation, Row, capabilities
from rlcore.spi.arrays import Int32Array, Int64Array


@frozen(kw_only=True, eq=False)
class Inputs:
    """Everything that a run reads before its first step."""

    tokenizer: Tokenizer
    tool_parser: ToolParser | None
    episodes: EpisodeRunner | None
    train_rows: Sequence[Row]
    train_kept: Int64Array
    """int64 [P]: the rows within the limits."""
    stream: PromptStream
    """The stream of prompts over the rows that were kept."""
    examples: Examples | None
    """Where the algorithm trains on demonstrations or preferences: those of the kept rows."""
    evaluation_rows: Sequence[Row] | None
    evaluation_kept: Int64Array
    """int64: the held-out rows within the limits."""
    measured: Int64Array
    """int64: those of them that evaluation.max_prompts lets pass."""
    notes: tuple[str, ...] = ()
    """What is odd about the data."""
    held_out: Examples | None = None
    """Held-out rows that the algorithm measures, within the limits; None where there are none."""

    def source(
        self,
        plan: RunPlan,
        generator: GeneratorGroup | None,
        clock: PhaseClock,
        progress: Progress,
        replayed: RecordedSchedule | None = None,
    ) -> Source:
        """Where the samples of the steps come from; a schedule that is `replayed` is one of this recipe's rollouts."""
        recipe = plan.recipe
        if self.examples is not None:
            return ExampleSource(examples=self.examples, stream=self.stream)
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
        )
        return RolloutSource(
            collector=collector,
            rows=self.train_rows,
            kept=self.train_kept,
            stream=self.stream,
            seed=recipe.run.seed,
            policy=policy_of(recipe),
            restarts=recipe.async_.partial_rollouts == "restart",
            overlaps=plan.overlaps,
            replayed=replayed,
        )

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
        )


@contextmanager
def load_inputs(prepared: RunPlan, tokenizer: Tokenizer | None = None) -> Iterator[Inputs]:
    """Read and check all data; the environment's event loop stops at the end."""
    recipe = prepared.recipe
    tokenizer = tokenizer or load_tokenizer(recipe.model)
    named = tokenizer.vocab_size if isinstance(tokenizer, PretrainedTokenizer) else None
    prepared.algorithm.vocab_size = vocab_size = named or config_number(recipe.model.path, "vocab_size")
    check_vocabulary(recipe, tokenizer)
    episodes = _episodes(prepared, vocab_size)
    try:
        observe = _observer(prepared, episodes)
        train_rows = rows_of(prepared, "train")
        examples = None
        if prepared.algorithm.needs.source != "rollouts":
            examples = _examples(prepared, "train", train_rows, tokenizer)
            train_kept = examples.rows
        else:
            train_kept = _within_limits(prepared, train_rows, "train", recipe.data.train, tokenizer, observe)
        evaluation_rows, evaluation_kept = None, np.zeros(0, np.int64)
        held_out = None
        if prepared.measures_examples:
            evaluation_rows = rows_of(prepared, "evaluation")
            held_out = _examples(prepared, "evaluation", evaluation_rows, tokenizer)
            evaluation_kept = held_out.rows
        elif prepared.environment is not None and recipe.data.evaluation is not None:
            evaluation_rows = rows_of(prepared, "evaluation")
            evaluation_kept = _within_limits(
                prepared, evaluation_rows, "evaluation", recipe.data.evaluation, tokenizer, observe
            )
        measured = evaluation_kept[: recipe.evaluation.max_prompts]
        notes: tuple[str, ...] = ()
        if evaluation_rows is not None and not _only_measured(prepared):
            notes = tuple(_overlap(recipe.data, _taken(train_rows, train_kept), _taken(evaluation_rows, measured)))
        yield Inputs(
            tokenizer=tokenizer,
            tool_parser=_tool_parser(prepared, tokenizer),
            episodes=episodes,
            train_rows=train_rows,
            train_kept=train_kept,
            stream=PromptStream(
                num_rows=len(train_kept),
                batch_size=recipe.training.prompts_per_step,
                seed=recipe.run.seed,
                shuffle=recipe.data.train.shuffle,
            ),
            examples=examples,
            evaluation_rows=evaluation_rows,
            evaluation_kept=evaluation_kept,
            measured=measured,
            notes=notes,
            held_out=held_out,
        )
    finally:
        if episodes is not None:
            episodes.close()


def _episodes(prepared: RunPlan, vocab_size: int | None) -> EpisodeRunner | None:
    if prepared.environment is None:
        return None
    recipe, entry = prepared.recipe, prepared.chosen["environment"]
    return EpisodeRunner(
        prepared.environment,
        recipe.rollout.environment_timeout_s,
        recipe.rollout.on_environment_error,
        entry.label,
        _concurrency(recipe.rollout, max_concurrent(entry, prepared.config("environment"))),
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
    return ToolParser.named(prepared.recipe.rollout.tool_parser, tokenizer.chat_template, engine)


def rows_of(prepared: RunPlan, split: Split) -> Sequence[Row]:
    """The rows of a data set that the recipe has."""
    config, entry = getattr(prepared.recipe.data, split), prepared.chosen.get("environment")
    is_learned = split == "train" or prepared.measures_examples
    source = prepared.algorithm.needs.source if is_learned else "rollouts"
    form = {"has_prompts": source != "preferences", "may_be_chats": source == "demonstrations"}
    if config.source == "python":
        return given_rows(prepared.given_rows.get(split), config, f"data.{split}", **form)
    owner = "environment" if entry is None else entry.label
    return load_rows(config, split, prepared.environment, owner, **form)


def _only_measured(prepared: RunPlan) -> bool:
    """Whether a program measures rows that stand in for those to train on, which it need not have."""
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
    prompt = row.get(PROMPT)
    return (
        prompt if isinstance(prompt, str) else json.dumps(dict(row) if prompt is None else prompt, sort_keys=True, default=str)
    )


def _observer(prepared: RunPlan, episodes: EpisodeRunner | None) -> Observe | None:
    """The prompts that the environment makes of rows, where it can say so before the run."""
    entry = prepared.chosen.get("environment")
    if episodes is None or entry is None or entry.provider is None:
        return None
    if capabilities.CHEAP_RESET not in entry.provider.capabilities:
        return None

    def observe(rows: Sequence[Row]) -> list[Observation]:
        observations = []
        for row, reset in zip(rows, episodes.reset_all(rows, [0] * len(rows)), strict=True):
            if isinstance(reset, Failure):
                # Masking is for what fails now and then during a run; a row that cannot even begin is a wrong row.
                raise DataError(f"the environment cannot begin an episode of row {row!r:.200}: {reset.reason}")
            observations.append(reset.observation)
        return observations

    return observe


def _examples(prepared: RunPlan, split: Split, rows: Sequence[Row], tokenizer: Tokenizer) -> Examples:
    """A data set's rows as they are learned, or measured."""
    examples = _rendered(prepared, split, rows, tokenizer)
    _require_known(prepared, split, "a row", examples.tokens.tokens)
    return examples


def _rendered(prepared: RunPlan, split: Split, rows: Sequence[Row], tokenizer: Tokenizer) -> Examples:
    rollout, config = prepared.recipe.rollout, getattr(prepared.recipe.data, split)
    if prepared.algorithm.needs.source == "demonstrations" and are_chats(rows, config):
        most = rollout.max_sequence_length
        return render_chats(rows, tokenizer, config, split=split, max_tokens=most, history=rollout.history)
    render = render_preferences if prepared.algorithm.needs.source == "preferences" else render_demonstrations
    return render(
        rows,
        tokenizer,
        config,
        split=split,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
    )


def _require_known(prepared: RunPlan, split: Split, where: str, tokens: Int32Array) -> None:
    """DataError where there are tokens that the model has no rows for."""
    vocab_size, greatest = prepared.algorithm.vocab_size, int(tokens.max(initial=0))
    if vocab_size is not None and greatest >= vocab_size:
        expected = f"tokens below {vocab_size}, the model's vocabulary. Its tokenizer is of another model, or adds tokens"
        raise DataError(f"data.{split}: found the token {greatest} in {where}; expected {expected} that it has no rows for")


def _within_limits(
    prepared: RunPlan, rows: Sequence[Row], split: Split, config: DatasetConfig, tokenizer: Tokenizer, observe: Observe | None
) -> Int64Array:
    """int64 [P]: the rows whose prompts are within the limit. Where only a reset could tell, all of them: each is then
    checked when its episode begins."""
    if observe is None:
        return np.arange(len(rows), dtype=np.int64)
    limit = prepared.recipe.rollout.max_prompt_tokens
    prompts = render_prompts(rows, tokenizer, config, split=split, max_prompt_tokens=limit, observe=observe)
    _require_known(prepared, split, "a prompt", prompts.tokens.tokens)
    return prompts.rows
