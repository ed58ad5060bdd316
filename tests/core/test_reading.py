"""Files that may be damaged: an error that names the file and the place, of the class that is asked for."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rlcore.reading import (
    MAX_DEPTH,
    SUMS,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_parquet,
    read_toml,
    write_parquet,
)
from rlcore.spi import CheckpointError, StorageError

DEEP = MAX_DEPTH + 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "line 1 column 1"),
        (b'{"a": 1,}', "line 1 column [89]"),
        (b'{"a":\n 1', "line 2"),
        (b"\xff{}", "position 0"),
        (b"[]", "a list"),
        (b"7", "an? int"),
        (b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}", "deep"),
        (b"[" * 10**5, "deep"),
    ],
    ids=lambda one: str(one)[:12],
)
def test_json_is_named_with_its_place(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "some.json"
    file.write_bytes(content)
    with pytest.raises(StorageError, match=rf"some\.json .*{named}"):
        read_json(file, StorageError)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"a = !\n", "line 1"),
        (b"\xff", "position 0"),
        (b"a = " + b"[" * DEEP + b"]" * DEEP, "deep"),
        (b"a = " + b"[" * 10**5, "deep"),
        (b".".join([b"a"] * DEEP) + b" = 1", "deep"),
    ],
    ids=lambda one: str(one)[:12],
)
def test_toml_is_named_with_its_place(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "some.toml"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"some\.toml .*{named}"):
        read_toml(file)


def test_what_is_as_deep_as_may_be_is_read() -> None:
    lists = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert parse_json(f'{{"a": {lists}}}').keys() == {"a"}
    assert parse_toml(f"a = {lists}").keys() == {"a"}


@pytest.mark.parametrize("path", ["missing.json", "a\0b", "."])
def test_what_is_no_file_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path / path)


@pytest.mark.parametrize("read", [read_bytes, read_json, read_toml, read_parquet])
@pytest.mark.parametrize(("kind", "named"), [("pipe", "named pipe"), ("device", "device"), ("sparse", "more bytes")])
def test_what_never_ends_is_not_opened(tmp_path: Path, read: Callable[[Path], object], kind: str, named: str) -> None:
    file = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 2**42)
    with pytest.raises(CheckpointError, match=f"{file} cannot be read: .*{named}"):
        read(file)


def test_a_table_is_compared_with_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "some.parquet"
    for number in range(2):  # the last digest of a name counts
        write_parquet(pa.table({"a": [number]}), file)
    assert read_parquet(file)["a"].to_pylist() == [1]
    (tmp_path / SUMS).unlink()
    assert read_parquet(file)["a"].to_pylist() == [1]
    (tmp_path / SUMS).write_text(f"{'0' * 64}  {file.name}\n")
    with pytest.raises(CheckpointError, match="another content"):
        read_parquet(file)


def test_texts_of_a_table_are_utf8(tmp_path: Path) -> None:
    texts = pa.array([b"\xff\xfe"], pa.binary())
    parquet.write_table(pa.table({"a": pa.Array.from_buffers(pa.string(), 1, texts.buffers())}), tmp_path / "some.parquet")
    with pytest.raises(CheckpointError, match=r"some\.parquet .*UTF8"):
        read_parquet(tmp_path / "some.parquet")
