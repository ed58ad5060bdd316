"""The bytes of a file of rows that is text."""

from pathlib import Path

from rlcore.schema.file_limits import memory_bytes, read_file
from rlcore.spi import DataError

MAX_LINE_BYTES = 64 * 2**20
"""A row longer than any model's context is no row but a file without line ends."""
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    **{b"BZh%d1AY&SY" % level: ("bzip2", "bunzip2 -k") for level in range(1, 10)},
    b"\xfd7zXZ\0": ("xz", "unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
"""The first bytes of compressed files: the format's name, and the program that decompresses it."""


def read_text_file(path: Path, key: str) -> bytes:
    """Read a file of rows. DataError where it cannot be read, or is compressed; `key` is its section of the recipe."""
    try:
        content = read_file(path, memory_bytes())
    except OSError as error:
        raise DataError(f"{key}.path: cannot read {path}: {error}") from error
    for mark, (name, command) in _COMPRESSED.items():
        if content.startswith(mark):
            raise DataError(
                f"{key}.path: {path} is compressed ({name}); expected text in UTF-8. Decompress it: {command} {path}"
            )
    return content
