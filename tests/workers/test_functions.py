"""Functions that users name: how they are found, again where their file has changed, and where they failed."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from rlcore import time_limit
from rlcore.schema.types import is_number
from rlcore.spi import ConfigError
from rlcore_workers.functions import brief, is_async, load_function, place_in


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("SEVEN = 7\n")
    path = tmp_path / "mine.py"
    path.write_text("from beside import SEVEN\ncalls = []\ndef f(): return SEVEN\ndef g(): return calls\n")
    return path


def test_functions_of_a_file_share_its_module_until_it_changes(file: Path) -> None:
    f, g = load_function(f"{file}:f", "key"), load_function(f"{file}:g", "key")
    assert f() == 7
    assert f.__globals__ is g.__globals__
    file.write_text("def f(): return 8\n")
    os.utime(file, ns=(1, 1))
    assert load_function(f"{file}:f", "key")() == 8


def test_a_file_that_changes_within_a_second_to_a_text_of_equal_size_loads_anew(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Python keeps bytecode, by a file's second and size."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    found = []
    for number in (1, 2):
        file.write_text(f"def value():\n    return {number}\n")
        os.utime(file, ns=(10**18, 10**18 + number))
        found.append(load_function(f"{file}:value", "key")())
    assert found == [1, 2]


def test_modules_are_named_too() -> None:
    assert load_function("os.path:join", "key") is os.path.join


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("mine.py:h", "'mine.py:h'.*AttributeError"),
        ("mine.py:SEVEN", "no function"),
        ("none.py:f", "FileNotFoundError"),
        ("no.such.module:f", "ModuleNotFoundError"),
        ("mine.py", "ValueError"),
    ],
)
def test_what_is_not_there_is_said(file: Path, monkeypatch: pytest.MonkeyPatch, name: str, names: str) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError, match=rf"(?s)key: found.*{names}.*FILE\.py:FUNCTION"):
        load_function(name, "key")


def test_a_module_that_ends_the_process_is_no_end(file: Path) -> None:
    file.write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=r"SystemExit at mine\.py:1: 3"):
        load_function(f"{file}:f", "key")


def test_where_a_file_failed_to_load(file: Path) -> None:
    (file.parent / "broken_beside.py").write_text("SEVEN = {}['x']\n")
    file.write_text("\n\nfrom broken_beside import SEVEN\n")
    with pytest.raises(ConfigError, match=r"KeyError at mine\.py:3: 'x'"):
        load_function(f"{file}:f", "key")


def test_where_a_function_failed(file: Path) -> None:
    file.write_text("def f():\n    return 1 // 0\n")
    function = load_function(f"{file}:f", "key")
    with pytest.raises(ZeroDivisionError) as raised:
        function()
    assert place_in(function, raised.value) == " at mine.py:2"
    assert place_in(len, raised.value) == ""


def test_objects_may_be_awaited_too() -> None:
    class Judge:
        async def __call__(self) -> float:
            return 1.0

    assert is_async(Judge())
    assert not is_async(len)


def test_numbers_are_finite_and_no_bools() -> None:
    assert all(map(is_number, (1, 0.5, np.float32(2), np.int64(3))))
    assert not any(map(is_number, (True, None, "1", float("nan"), float("inf"), 10**400, np.bool_(True))))


def test_long_values_are_cut() -> None:
    assert brief("x" * 200) == "'" + "x" * 79


def test_a_file_that_does_not_end_to_load_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LOAD_S", 0.03)
    file.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ConfigError, match=rf"LateError: {file} took longer than 0\.3 s"):
        load_function(f"{file}:reward", "key")
