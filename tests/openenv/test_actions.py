"""What an answer asks for: text, JSON, calls of tools, or what a user's function makes of it."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import RewardError
from rlcore_openenv.actions import last_object, tools_of, translator
from rlcore_openenv.config import OpenEnvConfig


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('first {"a": 1}, then {"a": {"b": 2}} and so on}', {"a": {"b": 2}}),
        ('```json\n{"code": "d = {}"}\n```', {"code": "d = {}"}),
        ('broken {"a": and whole {"b": []}', {"b": []}),
        ("\\frac{1}{2}", None),
        ("[1, 2]", None),
        ("", None),
        ('{"a":' * 5000, None),
        ("{\n" * 40_000, None),
        (('{"a":' * 900 + "x") * 50 + '{"b": 1}', {"b": 1}),
    ],
)
def test_the_last_json_object_of_an_answer_is_found(text: str, found: Any) -> None:
    assert last_object(text) == found


def test_tools_are_read_as_openai_has_them() -> None:
    listed = [{"name": "run", "description": None, "input_schema": None}, {"title": "no tool"}, 3]
    empty = {"type": "object", "properties": {}}
    assert tools_of({"tools": listed}) == [
        {"type": "function", "function": {"name": "run", "description": "", "parameters": empty}}
    ]
    assert tools_of({"tools": None}) == tools_of({}) == []


@pytest.fixture
def act(tmp_path: Path) -> Any:
    """Translates an answer by a function with this body."""

    def call(body: str) -> Any:
        file = tmp_path / "act.py"
        file.write_text(f"def act(answer, observation):\n    {body}\n")
        config = OpenEnvConfig(action="function", action_function=f"{file}:act")
        return translator(config)({"content": " up "}, {"moves": ["up"]})

    return call


def test_a_function_makes_the_action(act: Any) -> None:
    (attempt,) = act("return {'move': observation['moves'].index(answer)}")
    assert attempt.action == {"move": 0}


def test_a_function_that_finds_no_action_makes_the_answer_invalid(act: Any) -> None:
    (attempt,) = act("return None")
    assert attempt.action is None
    assert "no action" in attempt.fault


@pytest.mark.parametrize(
    ("body", "names"), [("return 3", "action_function returned 3"), ("1 / 0", "action_function.*ZeroDivisionError.*act.py:2")]
)
def test_a_function_that_fails_is_named(act: Any, body: str, names: str) -> None:
    with pytest.raises(RewardError, match=names):
        act(body)
