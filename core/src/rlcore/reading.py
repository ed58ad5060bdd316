"""Read JSON, TOML and Parquet files that may be damaged, and files of rows. An error names the file and the place in it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomli

from rlcore.schema.file_limits import MAX_BYTES, memory_bytes, read_file
from rlcore.schema.structure import structure
from rlcore.spi import CheckpointError, DataError, RlcoreError

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
MAX_DEPTH = 100
"""Most tables and lists within each other: the functions that read them afterwards are recursive."""
SUMS = "_SHA256SUMS"
"""Name of the file that lists the digests of the other files of its folder, in the format of sha256sum. The last line of a
name counts."""


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text. ValueError names the fault and its place."""
    try:
        return _shallow(json.loads(text))
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML document. ValueError, or tomli's subclass of it, names the fault and its place."""
    try:
        found: dict[str, Any] = _shallow(tomli.loads(text))
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    return found


def read_bytes(path: Path, error: type[RlcoreError] = CheckpointError, most: int | None = None) -> bytes:
    """Return a file's content. `error` where it cannot be read, has more than `most` bytes, or does not fit into memory."""
    try:
        return read_file(path, memory_bytes() if most is None else most)
    except (OSError, ValueError) as reason:  # ValueError: a NUL in its name
        raise error(f"{path} cannot be read: {getattr(reason, 'strerror', None) or reason}") from reason


def read_json(path: Path, error: type[RlcoreError] = CheckpointError) -> dict[str, Any]:
    """Return the object in a JSON file; `error` where it is damaged."""
    content = read_bytes(path, error, MAX_BYTES)
    try:
        found = parse_json(content)
    except ValueError as reason:
        raise error(_damaged(path, f"no JSON ({reason})", "a JSON object")) from reason
    if not isinstance(found, dict):
        raise error(_damaged(path, f"a {type(found).__name__}", "a JSON object"))
    return found


def read_toml(path: Path, error: type[RlcoreError] = CheckpointError) -> dict[str, Any]:
    """Return the table of a TOML file; `error` where it is damaged."""
    content = read_bytes(path, error, MAX_BYTES)
    try:
        return parse_toml(content.decode())
    except ValueError as reason:
        raise error(_damaged(path, f"no TOML ({reason})", "a recipe")) from reason


def read_record(path: Path, cls: type[T], error: type[RlcoreError] = CheckpointError) -> T:
    """Return an attrs instance from a JSON file. `error` names each key that is missing, unknown or of another type."""
    found, problems = structure(_without_null(read_json(path, error)), cls, str(path))
    if problems:
        raise error("\n".join(map(str, problems)))
    record: T = found
    return record


def numbers(instance: object, attribute: Any, value: Mapping[str, Any] | None) -> None:  # noqa: ARG001 - the form of attrs
    """Validate, for attrs, a mapping of numbers. They may be NaN, which recipes may not hold."""
    if wrong := [name for name, one in (value or {}).items() if type(one) not in (int, float)]:
        raise ValueError(f"{wrong[0]} = {(value or {})[wrong[0]]!r} is no number")


def read_parquet(path: Path) -> "pa.Table":
    """Return the table of a Parquet file. CheckpointError where it is damaged, or where its digest in SUMS differs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = read_bytes(path)
    expected = _sums(path.parent).get(path.name)
    if expected not in (None, hashlib.sha256(content).hexdigest()):
        raise CheckpointError(_damaged(path, "another content than was written", f"the digest that {SUMS} beside it has"))
    try:
        table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
        table.validate(full=True)  # texts may be no UTF-8
    except (pa.ArrowException, OSError, ValueError) as reason:
        raise CheckpointError(_damaged(path, f"no Parquet ({str(reason).strip()})", "a table of samples")) from reason
    return table


def write_parquet(table: "pa.Table", path: Path) -> None:
    """Write a table as a Parquet file atomically, and its digest to SUMS."""
    import pyarrow.parquet as pq

    partial = path.with_name(f".{path.stem}.partial")
    try:
        pq.write_table(table, partial, write_page_checksum=True)
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        with (path.parent / SUMS).open("a") as sums:  # before the file, which would count as damaged under an older digest
            sums.write(f"{digest}  {path.name}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _without_null(value: Any) -> Any:
    """Return the value without keys that are null, at any depth; TOML has no null."""
    return {name: _without_null(one) for name, one in value.items() if one is not None} if isinstance(value, dict) else value


def _sums(folder: Path) -> Mapping[str, str]:
    try:
        lines = read_file(folder / SUMS).decode(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("  ") for line in lines)
    return {name: digest for digest, separator, name in pairs if separator}


def _damaged(path: Path, found: str, expected: str) -> str:
    return f"{path} is damaged: found {found}; expected {expected}"


def _shallow(value: T) -> T:
    """Return the value; ValueError where it is nested more than MAX_DEPTH deep."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


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
