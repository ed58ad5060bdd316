"""What is refused before any server is asked."""

from pathlib import Path
from typing import Any

import pytest

from rlcore_openenv.check import check
from rlcore_openenv.config import OpenEnvConfig

URL = "http://localhost:8000"


def paths(**options: Any) -> list[str]:
    problems = check(None, OpenEnvConfig(**{"urls": (URL,), **options}))
    return [problem.path.removeprefix("environment.openenv.") for problem in problems]


@pytest.mark.parametrize("url", [URL, f"{URL}/", "https://space.example", "http://[::1]:8000/env"])
def test_addresses_of_servers_are_taken(url: str) -> None:
    assert paths(urls=(url,)) == []


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://h", "http://", "http://h:99999", "http://h:x", "http://h:0", "http://me:secret@h"),
        *("http://h/?a=1", "http://h#a", " http://h", "http://h h", "http://h/ws", "http://[::1", ""),
    ],
)
def test_what_is_no_address_is_refused_without_its_password(url: str) -> None:
    (problem,) = check(None, OpenEnvConfig(urls=(url,)))
    assert problem.path == "environment.openenv.urls"
    assert "secret" not in problem.found


def test_all_problems_are_told_at_once() -> None:
    assert paths(urls=()) == ["urls"]
    assert paths(urls=(URL, f"{URL}/", "x"), action="function") == ["urls", "urls", "action_function"]
    assert paths(action_function="json:loads") == ["action_function", "action_function"]
    assert paths(observation_function="json:loads", observation_fields=("a",)) == ["observation_function"]


@pytest.fixture
def function(tmp_path: Path) -> Any:
    """The path of a function with this definition."""

    def write(definition: str) -> str:
        file = tmp_path / "functions.py"
        file.write_text(f"{definition}: return None\n")
        return f"{file}:f"

    return write


@pytest.mark.parametrize(
    ("definition", "is_right"), [("def f(a, b)", True), ("def f(a)", False), ("async def f(a, b)", False), ("def g()", False)]
)
def test_functions_are_loaded_and_their_arguments_counted(function: Any, definition: str, is_right: bool) -> None:
    found = paths(action="function", action_function=function(definition))
    assert found == ([] if is_right else ["action_function"])
