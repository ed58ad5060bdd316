"""YAML that inherits, and overrides."""

import os
from pathlib import Path

import pytest

from rlcore.spi import ConfigError
from rlcore_import.yaml_files import merge, read_inherited, read_yaml, with_overrides


def test_numbers_are_those_of_yaml_12(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1e-6\nb: 5.0e-7\nc: 3\nd: 1.5\ne: no_number\nf: -2E3\ng: 2026-01-01\n")
    assert read_yaml(file) == {"a": 1e-6, "b": 5e-7, "c": 3, "d": 1.5, "e": "no_number", "f": -2000.0, "g": "2026-01-01"}


@pytest.mark.parametrize("text", ["- 1", "a: [", "a: !!python/object:os.system {}", "a: 1\nb: {c: 1, c: 2}", "a: 1\na: 1"])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        read_yaml(file)
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_yaml(tmp_path / "none.yaml")


def test_files_inherit_from_several_and_not_from_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: {y: 1, z: 2}\n")
    (tmp_path / "b.yaml").write_text("x: {z: 3}\n")
    (tmp_path / "c.yaml").write_text("defaults: [a.yaml, b.yaml]\nx: {w: 4}\n")
    assert read_inherited(tmp_path / "c.yaml") == {"x": {"y": 1, "z": 3, "w": 4}}
    (tmp_path / "a.yaml").write_text("defaults: c.yaml\n")
    with pytest.raises(ConfigError):
        read_inherited(tmp_path / "c.yaml")


def test_overrides_are_hydras() -> None:
    found = with_overrides({"a": {"b": 1}}, ["a.b=2", "+a.c=[1, x]", "++d={e: null}", "text=a=b", "empty="])
    assert found == {"a": {"b": 2, "c": [1, "x"]}, "d": {"e": None}, "text": "a=b", "empty": ""}
    assert with_overrides({}, ["a={k:1}", "b=on", "c=2026-01-01"]) == {"a": {"k": 1}, "b": "on", "c": "2026-01-01"}
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        with_overrides({}, ["nothing"])


def test_a_number_names_an_element_of_a_list() -> None:
    values = {"a": [{"b": 1, "c": 2}, 3], "d": {"0": 1}}
    assert with_overrides(values, ["a.0.b=5", "a.1=[4]", "d.0=2"]) == {"a": [{"b": 5, "c": 2}, [4]], "d": {"0": 2}}
    assert with_overrides(values, ["a.1=7", "a=8"]) == {"a": 8, "d": {"0": 1}}
    assert values["a"] == [{"b": 1, "c": 2}, 3]
    for nothing in ("a.2=1", "a.x=1", "a.x.y=1"):
        with pytest.raises(ConfigError, match="below a list of 2"):
            with_overrides(values, [nothing])


def test_tables_merge_and_other_values_replace() -> None:
    assert merge({"a": {"b": 1}, "c": {"d": 1}}, {"a": {"e": 2}, "c": None}) == {"a": {"b": 1, "e": 2}, "c": None}
    missing = {"a": {"b": "???", "e": "???"}, "c": "???"}
    assert merge({"a": {"b": 1}, "c": {"d": 1}}, missing) == {"a": {"b": 1, "e": "???"}, "c": {"d": 1}}


def test_overrides_leave_keys_out() -> None:
    values = {"a": {"b": 1, "c": 2}, "d": 3}
    assert with_overrides(values, ["~a.b", "~d=3"]) == {"a": {"c": 2}}
    assert values == {"a": {"b": 1, "c": 2}, "d": 3}
    for nothing in ("~a.x", "~d.x", "~y"):
        with pytest.raises(ConfigError, match="no such key"):
            with_overrides(values, [nothing])


def test_no_file_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(ConfigError, match="found a named pipe"):
        read_yaml(tmp_path / "recipe.yaml")
