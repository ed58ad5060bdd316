"""Imports the data sets of NeMo-RL's recipes."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlcore.spi import ConfigError, Problem
from rlcore_import.recipe import Unmapped
from rlcore_import.source import Source

OF_DEFAULTS = "data.default"
SPLITS = {"data.train": "data.train", "data.validation": "data.evaluation"}
"""NeMo-RL's tables of data sets, and rlcore's."""


@frozen(kw_only=True)
class KnownData:
    """A data set that NeMo-RL has a short name for."""

    path: str
    """The name on the Hub."""
    split: str | None = None
    subset: str | None = None
    prompt: str | None = None
    """The field with the prompt."""
    answer: str | None = None
    """The field with the right answer, of a prompt whose answers are checked, or the answer to learn."""
    held_out: float = 0.0
    """The share that is held out unless the recipe says otherwise."""
    note: str = ""
    """Conversion of rows to these fields."""


RANKED = "write rows with `prompt`, `chosen` and `rejected` by rank"
NESTED = "the prompt is a chat and the answer is within reward_model: write rows with `prompt` and `answer`"
KNOWN: Mapping[str, KnownData] = {
    "OpenMathInstruct-2": KnownData(
        path="nvidia/OpenMathInstruct-2", split="train_1M", prompt="problem", answer="expected_answer", held_out=0.05
    ),
    "DeepScaler": KnownData(path="agentica-org/DeepScaleR-Preview-Dataset", split="train", prompt="problem", answer="answer"),
    "DAPOMath17K": KnownData(
        path="BytedTsinghua-SIA/DAPO-Math-17k", split="train", prompt="prompt", answer="answer", note=NESTED
    ),
    "DAPOMathAIME2024": KnownData(
        path="BytedTsinghua-SIA/AIME-2024", split="train", prompt="prompt", answer="answer", note=NESTED
    ),
    "AIME2024": KnownData(path="HuggingFaceH4/aime_2024", split="train", prompt="problem", answer="answer"),
    "AIME2026": KnownData(path="MathArena/aime_2026", split="train", prompt="problem", answer="answer"),
    "gsm8k": KnownData(path="openai/gsm8k", subset="main", split="train", prompt="question", answer="answer"),
    "GSM8K": KnownData(path="openai/gsm8k", subset="main", split="train", prompt="question", answer="answer"),
    "OpenR1-Math-220k": KnownData(
        path="open-r1/OpenR1-Math-220k", subset="default", split="train", prompt="problem", answer="answer"
    ),
    "squad": KnownData(path="rajpurkar/squad", split="train", note="write rows with `messages`: context, question and answer"),
    "tulu3_sft_mixture": KnownData(path="allenai/tulu-3-sft-mixture", split="train", held_out=0.05),
    "Nemotron-Cascade-2-SFT-Math": KnownData(
        path="nvidia/Nemotron-Cascade-2-SFT-Data", subset="math", split="train", held_out=0.05
    ),
    "HelpSteer3": KnownData(
        path="nvidia/HelpSteer3",
        subset="preference",
        split="train",
        note="write rows with `prompt`, `chosen` and `rejected` by overall_preference",
    ),
    "Tulu3Preference": KnownData(path="allenai/llama-3.1-tulu-3-8b-preference-mixture", split="train"),
}
OF_FILES = ("", "ResponseDataset", "openai_format", "PreferenceDataset", "BinaryPreferenceDataset", "NemoGymDataset")
"""Names of file formats, in the place of a data set's name."""
OWN_CODE = "a set of NeMo-RL's own code: data.*.path is to be the file or the name on the Hub"
PROCESSORS = ("math_hf_data_processor", "math_data_processor", "sft_processor", "nemo_gym_data_processor")


def first_sets(tables: Mapping[str, Any]) -> tuple[dict[str, Any], list[Unmapped]]:
    """Return the recipe with one data set a split, and a report of the others."""
    found: Any = tables.get("data") or {}
    if not isinstance(found, Mapping):
        raise ConfigError([Problem(path="data", found=f"{found!r:.60}", expected="a table")])
    data, reports = dict(found), []
    for key in SPLITS:
        name = key.rpartition(".")[2]
        found = data.get(name)
        if isinstance(found, list) and found:
            data[name] = found[0]
            if len(found) > 1:
                why = "the first of several sets: [data.train.mix] has others"
                reports.append(Unmapped(key=key, value=found, why=why, changes_meaning=True))
    return {**tables, "data": data}, reports


def of_set(source: Source, table: str, key: str) -> str | None:
    """Return the value of a data set's key, else of the same key of `data.default`."""
    own, default = source.text(f"{table}.{key}"), source.text(f"{OF_DEFAULTS}.{key}")
    return default if own is None else str(own)


def import_data(source: Source, values: dict[str, Any], kind: str) -> None:
    """Import `data.train` and `data.evaluation`; `kind` is the table of the algorithm."""
    for table, section in SPLITS.items():
        keys = [key.removeprefix(f"{table}.") for key in source.mapped if key.startswith(f"{table}.")]
        found = {key: of_set(source, table, key) for key in keys}
        given = source.look(table)
        if given is not None and not isinstance(given, Mapping):
            source.refuse(table, "a table, or a list of tables")
        elif given:
            _dataset(source, values, kind, table, section, found)
    if not source.flag("data.shuffle", True):
        values["data.train.shuffle"] = False


def _dataset(
    source: Source, values: dict[str, Any], kind: str, table: str, section: str, found: Mapping[str, str | None]
) -> None:
    """Import one data set: its path and its fields."""
    name, file = found["dataset_name"] or "", found["data_path"]
    known = KNOWN.get(name)
    if found["processor"] not in (None, *PROCESSORS):
        source.report(
            _full_key(source, table, "processor"), "prompts are the rows' own, with environment.math.instruction around them"
        )
    if name == "NemoGymDataset":
        return  # the environment reads its own files
    if file:
        is_file = file.endswith((".jsonl", ".json")) or file.startswith((".", "/", "$"))
        known = KnownData(path=file, prompt="input", answer="output", note=RANKED if name == "PreferenceDataset" else "")
        values[f"{section}.source"] = "jsonl" if is_file else "huggingface"
        if name not in OF_FILES:
            source.report(_full_key(source, table, "dataset_name"), OWN_CODE)
    else:
        values[f"{section}.source"] = "huggingface"
        if known is None:
            source.report(_full_key(source, table, "dataset_name"), OWN_CODE)
    known = known or KnownData(path=name or "rows.jsonl")
    if known.note:
        source.report(_full_key(source, table, "dataset_name"), known.note)
    values[f"{section}.path"] = known.path
    if values[f"{section}.source"] == "huggingface":
        values |= {f"{section}.{key}": found[key] or getattr(known, key) for key in ("split", "subset")}
    _fields(source, values, kind, table, section, found, known)
    _held_out(source, table, known)
    values[f"{section}.on_long_prompt"] = "drop"
    for key in [key for key, value in values.items() if key.startswith(section) and value is None]:
        del values[key]


def _full_key(source: Source, table: str, key: str) -> str:
    """Return the full key that sets a data set's option: its own, else that of `data.default`."""
    return f"{table}.{key}" if source.look(f"{table}.{key}") is not None else f"{OF_DEFAULTS}.{key}"


def _held_out(source: Source, table: str, known: KnownData) -> None:
    key = f"{table}.split_validation_size"
    if source.number(key, known.held_out) and table == "data.train":
        source.report(key, "no share of a data set is held out: write one, and name it in data.evaluation")


def _fields(
    source: Source,
    values: dict[str, Any],
    kind: str,
    table: str,
    section: str,
    found: Mapping[str, str | None],
    known: KnownData,
) -> None:
    answer = found["output_key"] or known.answer
    is_of_pairs = kind in ("dpo", "rm")
    values[f"{section}.prompt_field"] = found["prompt_key"] if is_of_pairs else found["input_key"] or known.prompt
    if is_of_pairs:
        values |= {f"{section}.chosen_field": found["chosen_key"], f"{section}.rejected_field": found["rejected_key"]}
    elif kind == "sft":
        values[f"{section}.completion_field"] = answer
        values[f"{section}.messages_field"] = found["chat_key"]
    elif table == "data.train":
        values["environment.math.answer_field"] = answer
    elif answer != values.get("environment.math.answer_field"):
        source.report(
            _full_key(source, table, "dataset_name"),
            f"answers of held-out rows are in the field {answer}: name it as the others",
        )
    if kind != "grpo":
        for key in ("prompt_file", "system_prompt_file"):
            if found[key]:
                source.report(_full_key(source, table, key), "prompts are those of the rows")
