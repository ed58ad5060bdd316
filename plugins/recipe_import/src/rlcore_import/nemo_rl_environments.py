"""Imports the environments of NeMo-RL's recipes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore_import.nemo_rl_data import SPLITS, of_set
from rlcore_import.source import Source

TRAIN, RM, GYM = "data.train", "env.reward_model", "env.nemo_gym"
MATH = ("math", "math_default")
"""Environments of NeMo-RL whose rewards are those of `math`."""
UNREWARDED = "unrewarded"


def import_environment(source: Source, values: dict[str, Any], path: Path) -> None:
    """Import the environment that the training data name; any other becomes `unrewarded`, and is reported first."""
    name = of_set(source, TRAIN, "env_name") or next(iter(_tables(source)), "math")
    for other in _tables(source):
        if other != name:
            source.ignore(f"env.{other}")
    answer = values.pop("environment.math.answer_field", None)
    verifier = source.text("env.math.verifier_type", "math")
    if name in MATH and verifier == "math":
        _math(source, values, answer, path)
    elif name == "reward_model":
        _reward_model(source, values, path)
    elif name == "nemo_gym":
        _gym(source, values)
    else:
        values["environment.name"] = UNREWARDED
        what = f"{name!r}" if name not in MATH else f"{name!r} with verifier_type {verifier!r}"
        why = f'no environment {what} is here, and nothing is rewarded: write a function for environment.name = "function"'
        source.report("env.math.verifier_type" if name in MATH else "env", why)
        source.reports.insert(0, source.reports.pop())
    for key in ("prompt_file", "system_prompt_file"):  # of environments without an instruction
        if of_set(source, TRAIN, key) and values["environment.name"] in (UNREWARDED, "nemo_gym"):
            source.report(_place(source, key), "prompts are those of the rows")


def _tables(source: Source) -> list[str]:
    found = source.look("env")
    return [str(name) for name, table in found.items() if isinstance(table, Mapping)] if isinstance(found, Mapping) else []


def _place(source: Source, key: str) -> str:
    own = f"{TRAIN}.{key}"
    return own if source.look(own) is not None else f"data.default.{key}"


def _math(source: Source, values: dict[str, Any], answer: str | None, path: Path) -> None:
    values["environment.name"] = "math"
    if answer:
        values["environment.math.answer_field"] = answer
    key = "env.math.math_verify_impl"
    if source.text(key, "hf_math_verify") != "hf_math_verify":
        source.report(key, "answers are compared by math-verify, and earn 0 or 1, not -1 or 1 by the text behind Answer:")
    instruction = _text(source, "prompt_file", path)
    values["environment.math.instruction"] = "{problem}" if instruction is None else _instruction(instruction)
    system = _text(source, "system_prompt_file", path)
    if system is not None:
        values["environment.math.system_prompt"] = system


def _reward_model(source: Source, values: dict[str, Any], path: Path) -> None:
    """Import a classifier that scores chats."""
    section = "environment.reward_model"
    model = source.text(f"{RM}.model_name", "")
    values |= {"environment.name": "reward_model", f"{section}.path": model, f"{section}.prompt_format": "chat"}
    if source.text(f"{RM}.tokenizer.name", model) != model:
        source.report(f"{RM}.tokenizer.name", "the tokenizer is the model's own")
    precision = source.text(f"{RM}.precision", "bfloat16")
    values[f"{section}.dtype"] = "float32" if precision == "float32" else "bfloat16"
    values[f"{section}.max_batch"] = source.integer(f"{RM}.batch_size", 16, least=1)
    values[f"{section}.device"] = "cuda"
    system = _text(source, "system_prompt_file", path)
    if system is not None:
        values[f"{section}.system_prompt"] = system
    if _text(source, "prompt_file", path) not in (None, "{}"):
        source.report(_place(source, "prompt_file"), "prompts are those of the rows")


def _gym(source: Source, values: dict[str, Any]) -> None:
    """Import the agent servers of NeMo Gym, which its command starts."""
    section = "environment.nemo_gym"
    values["environment.name"] = "nemo_gym"
    source.take(GYM)
    for table, ours in SPLITS.items():
        for key in [key for key in values if key.startswith(f"{ours}.")]:
            del values[key]
        if (file := of_set(source, table, "data_path")) and source.look(table):
            values[f"{section}.{'train' if table == TRAIN else 'evaluation'}_files"] = [file]
            values[f"{ours}.source"] = "environment"
    if f"{section}.train_files" not in values:
        source.report(GYM, "environment.nemo_gym.train_files names its files of rows")
    source.report(GYM, "start NeMo Gym with this configuration before the run; environment.nemo_gym.head_url is its address")
    if source.look(f"{GYM}.effort_levels"):
        source.report(f"{GYM}.effort_levels", "no reward is scaled by the length of its answer")


def _text(source: Source, key: str, path: Path) -> str | None:
    """Return the text of a file that a data set names from the root of the checkout. Report a missing one and return None."""
    file = of_set(source, TRAIN, key)
    if not file:
        return None
    for folder in path.resolve().parents:
        if (folder / file).is_file():
            return (folder / file).read_text(encoding="utf-8")
    ours = "instruction" if key == "prompt_file" else "system_prompt"
    source.report(_place(source, key), f"the file was not found; {ours} of the environment is its text")
    return None


def _instruction(text: str) -> str:
    """Return NeMo-RL's prompt text as environment.math.instruction: `{}` becomes `{problem}`."""
    return text.replace("{{", "\0").replace("}}", "\1").replace("{}", "{problem}").replace("\0", "{").replace("\1", "}")
