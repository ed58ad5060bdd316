"""Tokenizer, data and collector: what a run reads, checked whole before any backend is built."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain, compress
from typing import Any

import numpy as np
from attrs import frozen

from rlcore.config.data import DataConfig
from rlcore.config.recipe import Recipe
from rlcore.model_files import config_number
from rlcore.run.data.examples import Examples
from rlcore.run.data.mixes import MixedRows, chunks_of, of_set
from rlcore.run.data.prompt_stream import MixedStream, PromptOrder, PromptStream
from rlcore.run.data.rows_digest import RowDigests, rows_digest, sampled
from rlcore.run.data.text import tokenizers
from rlcore.run.plan.collector import Collector, CollectorContext, LoopContext, PromptRows, build_collector
from rlcore.run.plan.data_sets import DataSet, all_rows, data_sets, examples_of, within_limits
from rlcore.run.plan.other_models import check_vocabulary
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import Source
from rlcore.run.train_step.held_out import ExampleSource
from rlcore.spi import ConfigError, DataError, Problem, Row, Tokenizer
from rlcore.spi.arrays import Int64Array


@frozen(kw_only=True, eq=False)
class Inputs:
    """Everything that a run reads before its first step."""

    tokenizer: Tokenizer
    collector: Collector | None
    """The collector of samples; None where no environment rewards any."""
    train_sets: Sequence[DataSet]
    train_rows: Sequence[Row]
    train_kept: Int64Array
    """int64 [P]: the rows within the limits."""
    stream: PromptOrder
    """The stream of prompts over the rows that were kept."""
    examples: Examples | None
    """The demonstrations or preferences of the kept rows; None where the algorithm trains on rollouts."""
    evaluation_rows: Sequence[Row] | None
    evaluation_kept: Int64Array
    """int64: the held-out rows within the limits."""
    measured: Int64Array
    """int64: those of them that evaluation.max_prompts lets pass, of each data set."""
    measured_sets: Sequence[str] = ()
    """The data set of each of these; none where there is only one."""
    notes: tuple[str, ...] = ()
    """Warnings about the data."""
    held_out: Examples | None = None
    """Held-out rows that the algorithm measures, within the limits; None where there are none."""

    def train_digests(self) -> RowDigests:
        """Return digests of the rows to train on: of all of them, unless an environment makes them."""
        own = [one for one in self.train_sets if one.config.source == "environment"]
        read = [one for one in self.train_sets if one.config.source != "environment"]
        return RowDigests(
            read=rows_digest(of_set(row, one.name) for one in read for row in _each(one.rows, one.key)) if read else None,
            own=rows_digest(of_set(row, one.name) for one in own for row in _each(sampled(one.rows), one.key)) if own else None,
        )

    @property
    def left_out(self) -> Iterator[str]:
        """Yield the number of rows of each split that are over the limits."""
        for split, rows, kept in (
            ("train", self.train_rows, self.train_kept),
            ("evaluation", self.evaluation_rows or (), self.evaluation_kept),
        ):
            if len(kept) < len(rows):
                yield f"data.{split}: {len(rows) - len(kept):,} of {len(rows):,} rows are over the limits and left out"

    @property
    def held_out_prompts(self) -> PromptRows | None:
        """The held-out rows that the collector asks for answers; None where there are none."""
        if self.collector is None or self.evaluation_rows is None:
            return None
        return PromptRows(rows=self.evaluation_rows, kept=self.measured)

    def source(self, loop: LoopContext | None) -> Source:
        """The source of the steps' samples. `loop` is None where nothing generates."""
        if self.examples is not None:
            rows = self.train_rows
            names_of = rows.names_of if isinstance(rows, MixedRows) else None
            return ExampleSource(examples=self.examples, stream=self.stream, names_of=names_of)
        assert self.collector is not None
        assert loop is not None
        return self.collector.source(PromptRows(rows=self.train_rows, kept=self.train_kept, order=self.stream), loop)


@contextmanager
def load_inputs(prepared: RunPlan, tokenizer: Tokenizer | None = None, *, resume: bool = False) -> Iterator[Inputs]:
    """Read and check all data; the collector is closed at the end."""
    recipe = prepared.recipe
    if prepared.replay_schedule is not None and prepared.algorithm.needs.source != "rollouts":
        found, expected = f"algorithm {recipe.algorithm.name!r}, which learns from a data set", "one that learns from samples"
        raise ConfigError([Problem(path="--replay-schedule", found=found, expected=expected)])
    tokenizer = tokenizer or tokenizers().load_tokenizer(recipe.model)
    prepared.algorithm.vocab_size = vocab_size = tokenizer.vocab_size or config_number(recipe.model.path, "vocab_size")
    check_vocabulary(recipe, tokenizer)
    with ExitStack() as stack:
        collector = None
        if prepared.environment is not None:
            context = CollectorContext(plan=prepared, tokenizer=tokenizer, vocab_size=vocab_size, resume=resume)
            collector = stack.enter_context(closing(build_collector(context)))
        observe = collector.observe if collector is not None and prepared.resets_cheaply else None
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
        order = _order(recipe, train_sets, train_kept)
        if collector is not None and examples is None and not prepared.evaluating:
            prepared.algorithm.read_rows(train_rows, tokenizer)
            notes += tuple(collector.check(PromptRows(rows=train_rows, kept=train_kept, order=order)))
        yield Inputs(
            tokenizer=tokenizer,
            collector=collector,
            train_sets=train_sets,
            train_rows=train_rows,
            train_kept=train_kept,
            stream=order,
            examples=examples,
            evaluation_rows=evaluation_rows,
            evaluation_kept=evaluation_kept,
            measured=measured,
            measured_sets=evaluation_rows.names_of(measured) if isinstance(evaluation_rows, MixedRows) else (),
            notes=(*notes, *(note for one in (*train_sets, *sets) for note in one.notes)),
            held_out=held_out,
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


def _only_measured(prepared: RunPlan) -> bool:
    """Return whether a program measures rows that stand in for those to train on, which it need not have."""
    given = prepared.given_rows
    return prepared.evaluating and "train" in given and given["train"] is given.get("evaluation")


def _taken(rows: Sequence[Row], numbers: Int64Array) -> Iterable[Row]:
    """Some of the rows, in order, gone through as a whole: that is faster than to take each by its number."""
    wanted = np.zeros(len(rows), np.bool_)
    wanted[numbers] = True
    return compress(_each(rows, "the data"), wanted.tolist())


def _each(rows: Iterable[Row], key: str) -> Iterator[Row]:
    return chain.from_iterable(chunk for _, chunk in chunks_of(rows, key))


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


def _prompt_key(row: Row) -> object:
    """Return a row's question as text, or the whole row where only the environment makes a prompt of it.

    Return an object that equals no other where JSON cannot hold the row.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    try:
        return json.dumps(dict(row) if prompt is None else prompt, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):  # keys of several types, values that hold themselves
        return object()
