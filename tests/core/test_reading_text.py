"""Files of rows as they are, and those that are none."""

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from rlcore.reading import read_text_file
from rlcore.spi import DataError

TEXT = b'{"prompt": "1+1="}\n'


@pytest.mark.parametrize("content", [TEXT, b"BZh,prompt\n1,1+1=\n", b""])
def test_text_is_read_as_it_is(tmp_path: Path, content: bytes) -> None:
    """Also where it begins with letters that begin a compressed file."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert read_text_file(path, "data.train") == content


@pytest.mark.parametrize(
    ("content", "name", "command"),
    [
        (gzip.compress(TEXT, mtime=0), "gzip", "gunzip -k"),  # the time would be in the test's name
        (bz2.compress(TEXT), "bzip2", "bunzip2 -k"),
        (lzma.compress(TEXT), "xz", "unxz -k"),
        (b"\x28\xb5\x2f\xfd\0", "zstd", "unzstd"),
    ],
)
def test_a_compressed_file_says_how_it_becomes_text(tmp_path: Path, content: bytes, name: str, command: str) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_text_file(path, "data.train")
    expected = f"data.train.path: {path} is compressed ({name}); expected text in UTF-8. Decompress it: {command} {path}"
    assert str(raised.value) == expected


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.train\.path: cannot read .*directory"):
        read_text_file(tmp_path, "data.train")
