"""Data sets and environments of NeMo-RL's recipes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from rlcore_import.source import Source


@frozen(kw_only=True)
class KnownData:
    """A data set that NeMo-RL knows by a name of its own."""

    path: str
    """The name on the Hub."""
    split: str | None = None
    subset: str | None = None
    prompt: str | None = None
    """The field with the prompt."""
    answer: str | None = None
    """The field with the right answer, of a prompt whose answers are checked, or the answer to learn."""
    note: str = ""
    """What has to be done before the fields are these."""


NESTED = "the prompt is a chat and the answer is within reward_model: write rows with `prompt` and `answer`"
KNOWN: Mapping[str, KnownData] = {
    "OpenMathInstruct-2": KnownData(
        path="nvidia/OpenMathInstruct-2", split="train_1M", prompt="problem", answer="expected_answer"
    ),
    "DeepScaler": KnownData(path="agentica-org/DeepScaleR-Preview-Dataset", split="train", prompt="problem", answer="answer"),
    "DAPOMath17K": KnownData(
        path="BytedTsinghua-SIA/DAPO-Math-17k", split="train", prompt="prompt", answer="answer", note=NESTED
    ),
    "DAPOMathAIME2024": KnownData(
        path="BytedTsinghua-SIA/AIME-2024", split="train", prompt="prompt", answer="answer", note=NESTED
    ),
    "AIME2024": KnownData(path="HuggingFaceH4/aime_2024", split="train", prompt="problem", answer="answer"),
    "gsm8k": KnownData(path="openai/gsm8k", subset="main", split="train", prompt="question", answer="answer"),
    "squad": KnownData(path="rajpurkar/squad", split="train", note="write rows with `messages`: context, question and answer"),
    "tulu3_sft_mixture": KnownData(path="allenai/tulu-3-sft-mixture", split="train"),
    "HelpSteer3": KnownData(
        path="nvidia/HelpSteer3",
        subset="preference",
        split="train",
        note="write rows with `prompt`, `chosen` and `rejected` by overall_preference",
    ),
    "Tulu3Preference": KnownData(path="allenai/llama-3.1-tulu-3-8b-preference-mixture", split="train"),
}
ENVIRONMENTS = ("math", "dapo", "math_multi_reward")
"""Environments of NeMo-RL whose rewards are those of `math`."""
PYTHON_ENVIRONMENT = "unrewarded"


def import_data(source: Source, values: dict[str, Any], kind: str, path: Path) -> None:
    """`data.train`, `data.evaluation` and the environment; `kind` is "grpo", "sft" or "dpo"."""
    defaults = _table(source.take("data.default"))
    train, validation = source.take("data.train"), source.take("data.validation")
    for split, given in (("train", train), ("evaluation", validation)):
        first = given[0] if isinstance(given, list) and given else given
        if isinstance(given, list) and len(given) > 1:
            source.report(
                f"data.{'train' if split == 'train' else 'validation'}",
                "the first of several sets: [data.train.mix] has others",
            )
        table = {**defaults, **_table(first)}
        if _table(first):
            _dataset(source, values, kind, split, table)
    if _table(train).get("split_validation_size"):
        source.report(
            "data.train.split_validation_size", "no share of a data set is held out: write one, and name it in data.evaluation"
        )
    if not source.take("data.shuffle", True):
        values["data.train.shuffle"] = False
    if kind == "grpo":
        _environment(source, values, {**defaults, **_table(train[0] if isinstance(train, list) and train else train)}, path)


def _table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _dataset(source: Source, values: dict[str, Any], kind: str, split: str, table: dict[str, Any]) -> None:
    theirs = f"data.{'train' if split == 'train' else 'validation'}"
    name, file = str(table.get("dataset_name") or ""), table.get("data_path")
    section = f"data.{split}"
    if file:
        is_file = str(file).endswith((".jsonl", ".json")) or str(file).startswith((".", "/", "$"))
        values |= {f"{section}.source": "jsonl" if is_file else "huggingface", f"{section}.path": str(file)}
        if not is_file and table.get("split"):
            values[f"{section}.split"] = str(table["split"])
        prompt, answer = table.get("input_key") or table.get("prompt_key"), table.get("output_key")
    else:
        known = KNOWN.get(name)
        if known is None:
            source.report(
                f"{theirs}.dataset_name", "a set of NeMo-RL's own code: data.*.path is to be the file or the name on the Hub"
            )
        elif known.note:
            source.report(f"{theirs}.dataset_name", known.note)
        values |= {f"{section}.source": "huggingface", f"{section}.path": known.path if known else name or "rows.jsonl"}
        if known and known.subset:
            values[f"{section}.subset"] = known.subset
        if chosen := table.get("split") or (known.split if known else None):
            values[f"{section}.split"] = str(chosen)
        prompt = table.get("input_key") or (known.prompt if known else None)
        answer = table.get("output_key") or (known.answer if known else None)
    if prompt:
        values[f"{section}.prompt_field"] = str(prompt)
    if kind == "sft" and answer:
        values[f"{section}.completion_field"] = str(answer)
    if kind == "sft" and table.get("chat_key"):
        values[f"{section}.messages_field"] = str(table["chat_key"])
    if kind == "dpo":
        for ours, key in (("chosen_field", "chosen_key"), ("rejected_field", "rejected_key")):
            if table.get(key):
                values[f"{section}.{ours}"] = str(table[key])
    if kind == "grpo" and answer and split == "train":
        values["environment.math.answer_field"] = "expected_answer" if answer == "generated_solution" else str(answer)
    values.setdefault(f"{section}.on_long_prompt", "drop")


def _environment(source: Source, values: dict[str, Any], table: dict[str, Any], path: Path) -> None:
    name = str(table.get("env_name") or next(iter(_table(source.look("env"))), "math"))
    if name not in ENVIRONMENTS:
        values["environment.name"] = PYTHON_ENVIRONMENT
        values.pop("environment.math.answer_field", None)
        source.report(
            "env",
            f'no environment {name!r} is here, and nothing is rewarded: write a function for environment.name = "function"',
        )
        return
    values["environment.name"] = "math"
    for key, ours in (("prompt_file", "instruction"), ("system_prompt_file", "system_prompt")):
        if not (file := table.get(key)):
            if key == "prompt_file":
                values["environment.math.instruction"] = "{problem}"
            continue
        text = _text_above(path, str(file))
        if text is None:
            source.report(f"data.default.{key}", f"the file was not found; environment.math.{ours} is its text")
        else:
            values[f"environment.math.{ours}"] = _instruction(text) if ours == "instruction" else text


def _instruction(text: str) -> str:
    """A text for str.format, whose one field is the problem, as environment.math.instruction has it."""
    return text.replace("{{", "\0").replace("}}", "\1").replace("{}", "{problem}").replace("\0", "{").replace("\1", "}")


def _text_above(path: Path, file: str) -> str | None:
    """The text of a file that is named from the root of the checkout in which `path` lies."""
    for folder in path.resolve().parents:
        if (folder / file).is_file():
            return (folder / file).read_text(encoding="utf-8")
    return None
