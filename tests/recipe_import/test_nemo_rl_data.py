"""Data sets of NeMo-RL's recipes keep their path and fields; differences are reported."""

from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from rlcore.spi import ConfigError

from .nemo_recipes import DPO, GRPO, SFT, grpo, imported, reported


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("{dataset_name: AIME2026}", {"path": "MathArena/aime_2026", "split": "train", "prompt_field": "problem"}),
        ("{dataset_name: gsm8k, split: test}", {"path": "openai/gsm8k", "subset": "main", "split": "test"}),
        ("{dataset_name: OpenMathInstruct-2}", {"split": "train_1M", "prompt_field": "problem"}),
        ("{data_path: ./rows.jsonl, input_key: q}", {"source": "jsonl", "path": "./rows.jsonl", "prompt_field": "q"}),
        ("{dataset_name: ResponseDataset, data_path: a.jsonl}", {"source": "jsonl", "prompt_field": "input"}),
        ("{data_path: acme/rows, split: s, subset: t}", {"source": "huggingface", "split": "s", "subset": "t"}),
    ],
)
def test_prompts_are_where_they_were(tmp_path: Path, valid, train: str, expected: dict[str, str]) -> None:
    found = grpo(tmp_path, "data.train=null", f"data.train={train}")
    assert {key: found.values.get(f"data.train.{key}") for key in expected} == expected
    valid(found)


@pytest.mark.parametrize(
    ("text", "train", "expected"),
    [
        (SFT, "{dataset_name: tulu3_sft_mixture}", {"path": "allenai/tulu-3-sft-mixture"}),
        (SFT, "{data_path: a.jsonl, output_key: o}", {"prompt_field": "input", "completion_field": "o"}),
        (SFT, "{dataset_name: openai_format, data_path: a.jsonl, chat_key: c}", {"messages_field": "c"}),
        (
            DPO,
            "{data_path: a.jsonl, prompt_key: p, chosen_key: c, rejected_key: r}",
            {"chosen_field": "c", "prompt_field": "p"},
        ),
    ],
)
def test_answers_are_where_they_were(tmp_path: Path, valid, text: str, train: str, expected: dict[str, str]) -> None:
    found = imported(tmp_path, text, "data.train=null", f"data.train={train}")
    assert {key: found.values.get(f"data.train.{key}") for key in expected} == expected
    valid(found)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.train={dataset_name: acme.MyData}", "data.train.dataset_name"),
        ("data.train={dataset_name: DAPOMath17K}", "data.train.dataset_name"),
        ("data.train={dataset_name: OpenMathInstruct-2}", "data.train.split_validation_size"),
        ("data.train.split_validation_size=0.1", "data.train.split_validation_size"),
        ("data.train.processor=vlm_hf_data_processor", "data.train.processor"),
        ("data.default.processor=acme.processor", "data.default.processor"),
        ("data.train.repeat=3", "data.train.repeat"),
        ("data.train.max_samples=3", "data.train.max_samples"),
        ("data.train.brand_new=3", "data.train.brand_new"),
        ("data.default.brand_new=3", "data.default.brand_new"),
        ("data.validation={dataset_name: ResponseDataset, data_path: a.jsonl}", "data.validation.dataset_name"),
        ("data.train=[{dataset_name: gsm8k}, {dataset_name: DeepScaler}]", "data.train"),
        ("data.train=[{dataset_name: gsm8k, brand_new: 1}]", "data.train.brand_new"),
    ],
)
def test_what_differs_is_reported(tmp_path: Path, override: str, key: str) -> None:
    assert key in reported(grpo(tmp_path, override))


def test_keys_of_a_set_count_before_those_of_all(tmp_path: Path) -> None:
    found = grpo(tmp_path, "data.default={env_name: math, input_key: all}", "data.train={data_path: a.jsonl, input_key: own}")
    assert found.values["data.train.prompt_field"] == "own"
    assert not {"data.default.input_key", "data.train.input_key"} & reported(found)


@pytest.mark.parametrize("text", [GRPO, SFT, DPO], ids=["grpo", "sft", "dpo"])
@pytest.mark.parametrize("value", [-1, float("inf"), True, "x", [1]], ids=str)
def test_no_table_of_another_form_crashes(tmp_path: Path, text: str, value: object) -> None:
    for key in (tables := yaml.safe_load(text)):
        with suppress(ConfigError):
            imported(tmp_path, yaml.safe_dump({**tables, key: value}))


@pytest.mark.parametrize("override", ["data.train=x", "data.train=[1]", "data.train={data_path: [a]}"])
def test_a_set_of_another_form_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        grpo(tmp_path, override)
