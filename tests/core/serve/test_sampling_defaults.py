"""What the server takes over from a model's generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.serve.sampling_defaults import sampling_defaults
from rlcore.spi import ModelError, SamplingParams, capabilities

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


@pytest.mark.parametrize("wrong", [{"top_p": 1.5}, {"temperature": "hot"}, {"top_k": -3}, []])
def test_what_is_no_number_is_a_defect_of_the_model(file: Path, wrong: Any) -> None:
    file.write_text(json.dumps(wrong))
    with pytest.raises(ModelError) as raised:
        sampling_defaults(file, ABLE)
    assert [problem.path for problem in raised.value.problems] == [str(file)]
