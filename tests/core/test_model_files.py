"""Numbers of a model are read from its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.model_files import config_number, read_object
from rlcore.spi import Problem


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    found = read_object(tmp_path)
    assert isinstance(found, Problem)
    assert (found.path, found.found) == (str(tmp_path), "Is a directory")


@pytest.mark.parametrize(
    ("config", "number"),
    [
        ({"vocab_size": 5}, 5),
        ({"vocab_size": 5, "text_config": {"vocab_size": 7}}, 7),
        ({"vocab_size": 0}, None),
        ({"vocab_size": "5"}, None),
        ({}, None),
        ([], None),
        ("{", None),
    ],
)
def test_a_number_is_the_one_of_the_text_model_or_none(tmp_path: Path, config: Any, number: int | None) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert config_number(str(tmp_path), "vocab_size") == number


def test_a_name_on_the_hub_states_no_number() -> None:
    assert config_number("someone/model", "vocab_size") is None
