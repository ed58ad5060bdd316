"""What the server takes over from a model's generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import ModelError, SamplingParams, capabilities
from rlcore_serve.sampling_defaults import sampling_defaults

ABLE = {capabilities.TOP_K, capabilities.TOP_P}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "generation_config.json"


def test_temperature_and_truncation_are_defaults(file: Path) -> None:
    file.write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 3, "min_p": None}))
    assert sampling_defaults(file, ABLE) == (SamplingParams(temperature=0.6, top_p=0.95, top_k=20), [])
    assert sampling_defaults(None, ABLE) == (SamplingParams(), [])


def test_what_the_generator_does_not_do_is_said(file: Path) -> None:
    file.write_text(json.dumps({"top_k": 20, "temperature": 0.5, "repetition_penalty": 1.05, "no_repeat_ngram_size": 0}))
    sampling, notes = sampling_defaults(file, {capabilities.TOP_P})
    assert sampling == SamplingParams(temperature=0.5)
    assert [note.partition(",")[0].rpartition("says ")[2] for note in notes] == ["top_k = 20", "repetition_penalty = 1.05"]


@pytest.mark.parametrize(
    ("key", "value", "is_said"),
    [
        *(("typical_p", 0.9, True), ("typical_p", 1.0, False), ("min_new_tokens", 4, True), ("min_length", 0, False)),
        *(("stop_strings", ["#"], True), ("stop_strings", [], False), ("suppress_tokens", [3], True), ("num_beams", 1, False)),
        *(("forced_eos_token_id", 0, True), ("forced_eos_token_id", None, False), ("sequence_bias", [[[3], 1.0]], True)),
    ],
)
def test_keys_that_change_what_is_sampled_are_said(key: str, value: Any, is_said: bool, file: Path) -> None:
    file.write_text(json.dumps({key: value}))
    _, notes = sampling_defaults(file, ABLE)
    assert [note.partition(" = ")[0].rpartition(" ")[2] for note in notes] == [key] * is_said


@pytest.mark.parametrize("wrong", [{"top_p": 1.5}, {"temperature": "hot"}, {"top_k": -3}, []])
def test_what_is_no_number_is_a_defect_of_the_model(file: Path, wrong: Any) -> None:
    file.write_text(json.dumps(wrong))
    with pytest.raises(ModelError) as raised:
        sampling_defaults(file, ABLE)
    assert [problem.path for problem in raised.value.problems] == [str(file)]
