"""Reads a run's data without building anything: the number of rows, and the first prompt as the model sees it."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from attrs import frozen

from rlcore.config.data import DatasetConfig, Split
from rlcore.registry.run_parts import only_function
from rlcore.run.data.mixes import MixedRows
from rlcore.run.data.text import renderer, tokenizers
from rlcore.run.plan.data_sets import rows_of
from rlcore.run.plan.inputs import Inputs, load_inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.schema.file_limits import expanded
from rlcore.spi import Row, Tokenizer, installed_data_sources

MAX_SHOWN = 200
"""Most characters of a field that the environment gets."""


@frozen(kw_only=True)
class Preview:
    """The data that a run would read."""

    rows: Mapping[Split, str]
    """How many rows each data set has, and where they are from; of those that can be opened here."""
    first_prompt: str | None
    """The first row's prompt through the chat template, special tokens included; None where it cannot be told here."""
    target: Mapping[str, str]
    """The rest of the first row: the answers to learn, with their ends, or the fields that the environment gets. Empty where
    `first_prompt` is None, unless agents make the prompts."""
    notes: Sequence[str]
    """Parts that were not read, and warnings about the rest."""


def preview(prepared: RunPlan, tokenizer: Tokenizer | None = None) -> Preview:
    """Read and check the data as a run does at its start. What is on the Hub is not fetched: a note says so.

    Raises DataError and ModelError as the run would. `tokenizer` stands in for the model's own, in tests.
    """
    recipe, notes = prepared.recipe, []
    remote = {split: paths for split, config in _data_sets(prepared).items() if (paths := _remote(config))}
    unopened = "is not on this machine, and was not opened"
    notes += [f"data.{split}: {path} {unopened}" for split, paths in remote.items() for path in paths]
    if tokenizer is None and not tokenizers().is_here(recipe.model):
        notes.append(f"model.path: the tokenizer of {recipe.model.path} is on the Hub, so that no prompt was made")
    elif not remote:
        with load_inputs(prepared, tokenizer) as inputs:
            rows = {split: _described(prepared, split, inputs) for split in _data_sets(prepared)}
            prompt = _first_prompt(prepared, inputs)
            is_shown = prompt is not None or prepared.runs_agents
            target = _target(inputs, prepared.algorithm.needs.source == "preferences") if is_shown else {}
            return Preview(rows=rows, first_prompt=prompt, target=target, notes=(*notes, *inputs.notes))
    counts: dict[Split, str] = {}
    for split, config in _data_sets(prepared).items():
        if split not in remote:
            rows_here = rows_of(prepared, split)
            counts[split] = f"{_counted(len(rows_here), config)}{_formats(rows_here)}"
    return Preview(rows=counts, first_prompt=None, target={}, notes=notes)


def _data_sets(prepared: RunPlan) -> dict[Split, DatasetConfig]:
    data = prepared.recipe.data
    sets: dict[Split, DatasetConfig] = {"train": data.train}
    if data.evaluation is not None and (prepared.environment is not None or prepared.measures_examples):
        sets["evaluation"] = data.evaluation
    return sets


def _remote(config: DatasetConfig) -> list[str]:
    """Return the parts of a data set that are not on this machine."""
    parts = [config] if config.mix is None else config.parts().values()
    paths = [part.path or "" for part in parts if _is_name(part.source)]
    return [path for path in paths if not expanded(path).exists()]


def _is_name(source: str) -> bool:
    """Return whether the paths of a data source are names, such as those on the Hub."""
    provider = installed_data_sources().get(source)
    return provider is not None and provider.path == "name"


def _counted(number: int, config: DatasetConfig) -> str:
    if config.mix is not None:
        names = ", ".join(f"{name} (weight {part.weight:g})" for name, part in config.mix.items())
        return f"{number:,} rows of {names}"
    where = {"environment": "the environment", "python": "the program"}.get(config.source, config.path)
    return f"{number:,} row{'' if number == 1 else 's'} of {where}"


def _described(prepared: RunPlan, split: Split, inputs: Inputs) -> str:
    rows = inputs.train_rows if split == "train" else inputs.evaluation_rows or ()
    kept = inputs.train_kept if split == "train" else inputs.evaluation_kept
    left_out = f", of which {len(rows) - len(kept):,} are over the limits and left out" if len(kept) < len(rows) else ""
    kept_beside = ""
    is_compared = split == "train" and prepared.algorithm.needs.reference_logprobs
    if is_compared and inputs.examples is not None and only_function("reference_cache") is not None:
        num_bytes = 4 * len(inputs.examples.tokens.tokens)
        kept_beside = f"; the reference's log-probabilities of them take up to {num_bytes:,} bytes in the run directory"
    return f"{_counted(len(rows), _data_sets(prepared)[split])}{_formats(rows)}{left_out}{kept_beside}"


def _formats(rows: Sequence[Row]) -> str:
    """Describe the formats of rows, or of each of several data sets; "" for rows in rlcore's own fields."""
    sets: Mapping[str, Sequence[Row]] = rows.sets if isinstance(rows, MixedRows) else {"": rows}
    found = {name: form for name, one in sets.items() if (form := getattr(one, "format", None)) not in (None, "rlcore")}
    return "".join(f", {name} in the format {form}".replace("  ", " ") for name, form in found.items())


def _target(inputs: Inputs, has_pairs: bool) -> dict[str, str]:
    """Return what the first row has besides its prompt, two answers with `has_pairs`: see Preview.target."""
    examples = inputs.examples
    if examples is None:
        row = inputs.train_rows[int(inputs.train_kept[0])]
        return {name: f"{value!r:.{MAX_SHOWN}}" for name, value in row.items() if name != "prompt"}
    names = ("chosen", "rejected") if has_pairs else ("to learn",)
    found = {}
    for number, name in enumerate(names):
        start, end = examples.tokens.offsets[number : number + 2]
        tokens, learned = examples.tokens.tokens[start:end], examples.learned[start:end]
        runs = groupby(zip(tokens.tolist(), learned.tolist(), strict=True), key=lambda pair: pair[1])
        found[name] = " … ".join(inputs.tokenizer.show([token for token, _ in run]) for is_learned, run in runs if is_learned)
    return found


def _first_prompt(prepared: RunPlan, inputs: Inputs) -> str | None:
    """The prompt of the first row that is trained on. An environment makes it only where it promises that this is cheap."""
    if inputs.examples is not None:
        return inputs.tokenizer.show(inputs.examples.tokens.sequence(0)[: int(inputs.examples.learned.argmax())])
    if inputs.collector is None or not prepared.resets_cheaply:
        return None
    shown = inputs.collector.observe([inputs.train_rows[int(inputs.train_kept[0])]])
    (tokens,) = renderer().encode_prompts(shown, inputs.tokenizer)
    return inputs.tokenizer.show(tokens)
