"""Every key of the default files of another library is listed with what becomes of it, and nothing else is.

`NAME_defaults.json` holds the keys of a library's own default files, with the values that they have there, its repository
and by commit the files that were composed.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlcore_import import nemo_rl_keys, verl_keys

HERE = Path(__file__).parent
LISTS: dict[str, ModuleType] = {"verl": verl_keys, "nemo_rl": nemo_rl_keys}
LIBRARIES = [library for library in LISTS if (HERE / f"{library}_defaults.json").exists()]


def defaults_of(library: str) -> dict[str, list[Any]]:
    """The keys with the values that the library's files give them."""
    keys: dict[str, list[Any]] = json.loads((HERE / f"{library}_defaults.json").read_text())["keys"]
    return keys


def is_listed(key: str, module: ModuleType) -> bool:
    return key in module.MAPPED or any(fnmatchcase(key, row.pattern) for row in module.DROPPED)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_key_of_the_defaults_is_listed(library: str) -> None:
    assert [key for key in defaults_of(library) if not is_listed(key, LISTS[library])] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_of_whole_tables_are_those_that_cannot_change_what_is_trained_or_are_always_reported(library: str) -> None:
    """OPEN_TABLES: what is logged or profiled, and tables whose keys that library passes on."""
    module = LISTS[library]
    of_tables = {row.pattern for row in module.DROPPED if "*" in row.pattern}
    assert of_tables == {f"{table}.*" for table in module.OPEN_TABLES}
    assert len({row.pattern for row in module.DROPPED}) == len(module.DROPPED), "a key is listed twice"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_key_of_another_name_is_unknown_in_every_table(library: str) -> None:
    module = LISTS[library]
    tables = {".".join(key.split(".")[:depth]) for key in defaults_of(library) for depth in range(key.count(".") + 1)}
    closed = [table for table in tables if not any(f"{table}.".startswith(f"{one}.") for one in module.OPEN_TABLES)]
    assert [key for table in closed if is_listed(key := f"{table}.brand_new".lstrip("."), module)] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_is_said_to_train_the_same_by_the_pattern_of_a_table(library: str) -> None:
    whys = {row.why for row in LISTS[library].DROPPED if "*" in row.pattern and not row.changes_meaning}
    assert not any("speed" in why or "the same" in why for why in whys)
