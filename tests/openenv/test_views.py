"""What the policy reads of an observation."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import PluginError, RewardError
from rlcore_openenv.config import OpenEnvConfig
from rlcore_openenv.views import fields_text, view


@pytest.mark.parametrize(
    ("observation", "names", "text"),
    [
        ({"text": "go"}, (), "go"),
        ({"text": "go", "left": 2}, (), '{"text": "go", "left": 2}'),
        ({"text": "gö", "left": 2}, ("text",), "gö"),
        ({"text": "gö", "left": 2, "board": [1]}, ("board", "text"), '{"board": [1], "text": "gö"}'),
        ({"board": [[0, 1]]}, (), "[[0, 1]]"),
        ({}, (), ""),
    ],
)
def test_one_text_is_shown_as_it_is_and_anything_else_as_json(
    observation: dict[str, Any], names: tuple[str, ...], text: str
) -> None:
    assert fields_text(observation, names) == text


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(PluginError, match="'b', 'c'.*'a'"):
        fields_text({"a": 1}, ("a", "b", "c"))


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"tool_name": "t", "result": {"data": "seen", "content": []}, "error": None}, "seen"),
        ({"tool_name": "t", "result": {"data": [1]}, "error": None}, "[1]"),
        ({"tool_name": "t", "result": {"content": []}}, '{"content": []}'),
        ({"tool_name": "t", "result": None, "error": {"error_type": "timeout", "message": "late"}}, "error: late"),
        ({"text": "go"}, "go"),
    ],
)
def test_of_a_tool_its_result_or_error_is_shown(observation: dict[str, Any], text: str) -> None:
    assert view(OpenEnvConfig(action="tools"))(observation) == text


@pytest.fixture
def show(tmp_path: Path) -> Any:
    """Shows an observation by a function with this body."""

    def call(body: str) -> str:
        file = tmp_path / "show.py"
        file.write_text(f"def show(observation):\n    {body}\n")
        return view(OpenEnvConfig(observation_function=f"{file}:show"))({"text": "go"})

    return call


def test_a_function_writes_the_text(show: Any) -> None:
    assert show("return observation['text'] * 2") == "gogo"


@pytest.mark.parametrize(
    ("body", "names"),
    [("return None", "observation_function returned None"), ("1 / 0", "observation_function.*ZeroDivisionError.*show.py:2")],
)
def test_a_function_that_fails_is_named(show: Any, body: str, names: str) -> None:
    with pytest.raises(RewardError, match=names):
        show(body)
