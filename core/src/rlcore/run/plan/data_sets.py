"""The data sets of a recipe, read and checked: their rows, and what of these is learned, measured or asked."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from attrs import field, frozen

from rlcore.config.data import DatasetConfig, Split
from rlcore.registry.discovery import Entry
from rlcore.registry.sample_checks import check_vocabulary
from rlcore.run.data.examples import Examples, joined_examples
from rlcore.run.data.mixes import DATA_SET, MixedAgents, MixedEnvironment, MixedRows, chunks_of, of_set
from rlcore.run.data.text import Observe, renderer, row_name
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import AgentEnvironment, DataError, Environment, Observation, Row, Tokenizer
from rlcore.spi.arrays import Int32Array, Int64Array


@frozen(kw_only=True, eq=False)
class DataSet:
    """One data set: that of a split, or one of those which are mixed for it."""

    key: str
    """Its section of the recipe."""
    name: str | None
    """Its name among several."""
    config: DatasetConfig
    rows: Sequence[Row]
    first: int
    """The number of its first row among those of the split."""
    told: dict[str, str] = field(factory=dict)
    """Fields of its rows that the core does not read, each with its note. Reading rows adds to them."""

    @property
    def notes(self) -> list[str]:
        """Notes on fields of its rows that the core does not read. Complete once all rows were read."""
        return [f"{self.key}: rows have a field {name!r}: {what}" for name, what in self.told.items()]


def data_sets(prepared: RunPlan, split: Split) -> list[DataSet]:
    """The data sets of a split that the recipe has."""
    config: DatasetConfig = getattr(prepared.recipe.data, split)
    if config.mix is None:
        told: dict[str, str] = {}
        rows = _loaded(prepared, split, config, None, told)
        _require_unnamed(prepared, f"data.{split}", rows)
        return [DataSet(key=f"data.{split}", name=None, config=config, rows=rows, first=0, told=told)]
    found, first = [], 0
    for name, part in config.parts().items():
        told = {}
        rows = _loaded(prepared, split, part, name, told)
        found.append(DataSet(key=f"data.{split}.mix.{name}", name=name, config=part, rows=rows, first=first, told=told))
        first += len(rows)
    return found


def _require_unnamed(prepared: RunPlan, key: str, rows: Sequence[Row]) -> None:
    """DataError where the rows of one data set name another by a field of theirs, whose environment would get them."""
    environment = prepared.environment
    if not isinstance(environment, MixedEnvironment | MixedAgents):
        return
    for number, row in ((start + place, row) for start, chunk in chunks_of(rows, key) for place, row in enumerate(chunk)):
        if str(row.get(DATA_SET)) in environment.of_set:
            raise DataError(
                f"{key}: {row_name(rows, number)} has a field {DATA_SET!r} with {row[DATA_SET]!r}, a set of the other split's "
                "mix; expected no such name, which says whose environment a row is for. Rename the field, or the set"
            )


def rows_of(prepared: RunPlan, split: Split) -> Sequence[Row]:
    """The rows of a split that the recipe has."""
    return all_rows(data_sets(prepared, split))


def all_rows(sets: Sequence[DataSet]) -> Sequence[Row]:
    """The rows of a split's data sets; of several, one set after another, each row with the name of its own."""
    return sets[0].rows if sets[0].name is None else MixedRows({one.name or "": one.rows for one in sets})


def _loaded(prepared: RunPlan, split: Split, config: DatasetConfig, name: str | None, told: dict[str, str]) -> Sequence[Row]:
    is_learned = split == "train" or prepared.measures_examples
    source = prepared.algorithm.needs.source if is_learned else "rollouts"
    form = {
        "has_prompts": source != "preferences",
        "may_be_chats": source == "demonstrations",
        "for_agents": source == "rollouts" and prepared.runs_agents,
    }
    if config.source == "python":
        return renderer().given_rows(prepared.given_rows.get(split), config, f"data.{split}", told=told, **form)
    environment, entry = _environment_of(prepared, name)
    owner, key = (
        "environment" if entry is None else entry.label,
        f"data.{split}" if name is None else f"data.{split}.mix.{name}",
    )
    return renderer().load_rows(config, split, environment, owner, key=key, told=told, **form)


def _environment_of(prepared: RunPlan, name: str | None) -> tuple[Environment | AgentEnvironment | None, Entry | None]:
    """The environment of a data set, which its rows may be of."""
    environment, entries = prepared.environment, {entry.name: entry for entry in prepared.environments}
    if not isinstance(environment, MixedEnvironment | MixedAgents):
        return environment, prepared.chosen.get("environment")
    wanted = environment.of_set.get(name or "", next(iter(entries)))
    return environment.backends[wanted], entries[wanted]


def examples_of(prepared: RunPlan, sets: Sequence[DataSet], tokenizer: Tokenizer) -> Examples:
    """The rows of a split as they are learned, or measured."""
    parts = []
    for one in sets:
        parts.append(
            renderer().render_examples(
                one.rows, tokenizer, one.config, prepared.recipe.rollout, key=one.key, source=prepared.algorithm.needs.source
            )
        )
        _require_known(prepared, one.key, "a row", parts[-1].tokens.tokens)
    return parts[0] if len(parts) == 1 else joined_examples(parts, [one.first for one in sets])


def _require_known(prepared: RunPlan, key: str, where: str, tokens: Int32Array) -> None:
    """DataError where there are tokens that the model has no rows for."""
    check_vocabulary(f"{where} of {key}", int(tokens.max(initial=0)), prepared.algorithm.vocab_size)


def within_limits(prepared: RunPlan, sets: Iterable[DataSet], tokenizer: Tokenizer, observe: Observe | None) -> Int64Array:
    """int64 [P]: the rows whose prompts are within the limit. Where only a reset could tell, all of them: each is then
    checked when its episode begins."""
    parts = []
    for one in sets:
        if observe is None:
            parts.append(np.arange(len(one.rows), dtype=np.int64) + one.first)
            continue
        limit = one.config.max_prompt_tokens or prepared.recipe.rollout.max_prompt_tokens
        prompts = renderer().render_prompts(
            one.rows,
            tokenizer,
            one.config,
            key=one.key,
            max_prompt_tokens=limit,
            observe=partial(_observed, observe, one),
        )
        _require_known(prepared, one.key, "a prompt", prompts.tokens.tokens)
        parts.append(prompts.rows + one.first)
    return np.concatenate(parts)


def _observed(observe: Observe, one: DataSet, rows: Sequence[Row]) -> Sequence[Observation]:
    shown = observe([of_set(row, one.name) for row in rows])
    if any(row.get("tools") and not prompt.tools for row, prompt in zip(rows, shown, strict=True)):
        one.told["tools"] = "the environment does not show them to the policy"
    return shown
