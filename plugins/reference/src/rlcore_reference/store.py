"""The reference's log-probabilities of what a data set holds: computed once for each sequence, and kept in the run directory.

They never change, so every epoch and a resumed run read what the first one computed: 4 bytes a token, 8 in float64, at most as
many as the data set has. A sequence is found by its tokens, so that nothing has to say which row of which file it was. Other
data, or another chat template, find nothing of what they do not share. What another model or trainer computed is thrown away.
"""

import hashlib
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from rlcore.spi import StorageError, TokenBatch
from rlcore.spi.arrays import Float32Array, Int64Array

FILE = "reference_logprobs.sqlite"
_TABLES = """
create table if not exists made_by (identity text primary key);
create table if not exists logprobs (tokens blob primary key, value blob not null, crc integer not null) without rowid;
"""


class ReferenceStore:
    """A file of log-probabilities by their sequence's tokens. The run directory's lock keeps other processes from it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        """`connection` is to the file at `path`, whose tables are there."""
        self._connection = connection
        self._path = path

    @classmethod
    @contextmanager
    def open(cls, directory: Path, identity: str, note: Callable[[str], None]) -> "Iterator[ReferenceStore]":
        """The store in a run directory, closed at the end. One of another `identity`, or damaged, is begun anew with a note.
        StorageError where it cannot be written."""
        path = directory / FILE
        with _storage_errors(path):
            connection = _connect(path)
            if fault := _fault(connection, identity):
                note(f"{path} {fault}: the reference's log-probabilities are computed again")
                connection.close()
                path.unlink()
                path.with_name(f"{FILE}-journal").unlink(missing_ok=True)
                connection = _connect(path)
                _fault(connection, identity)
        with closing(connection):
            yield cls(connection, path)

    def logprobs(self, batch: TokenBatch, compute: Callable[[Int64Array], Float32Array]) -> Float32Array:
        """float32 or float64 [T]: what is kept of a batch's sequences. Of the others it is what `compute` returns for their
        numbers, int64 [M], which is [T] of the same dtype and kept from now on."""
        sequences = [slice(*bounds) for bounds in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)]
        keys = [_key(batch, number, tokens) for number, tokens in enumerate(sequences)]
        with _storage_errors(self._path):
            found = {
                key: value
                for key, tokens in dict(zip(keys, sequences, strict=True)).items()
                if (value := self._read(key, tokens.stop - tokens.start)) is not None
            }
        missing = {key: number for number, key in reversed([*enumerate(keys)]) if key not in found}
        if missing:
            computed = compute(np.asarray(sorted(missing.values()), np.int64))
            new = {key: computed[sequences[number]] for key, number in missing.items()}
            with _storage_errors(self._path), self._connection:
                rows = [(key, blob := value.tobytes(), zlib.crc32(blob)) for key, value in new.items()]
                self._connection.executemany("insert or replace into logprobs values (?, ?, ?)", rows)
            found |= new
        return np.concatenate([found[key] for key in keys])

    def _read(self, key: bytes, length: int) -> Float32Array | None:
        """The values of one sequence; None where they are not there, or not what was written."""
        row = self._connection.execute("select value, crc from logprobs where tokens = ?", (key,)).fetchone()
        dtypes = {4 * length: np.float32, 8 * length: np.float64}
        if row is None or type(row[0]) is not bytes or len(row[0]) not in dtypes or zlib.crc32(row[0]) != row[1]:
            return None
        return np.frombuffer(row[0], dtypes[len(row[0])])


def _key(batch: TokenBatch, number: int, tokens: slice) -> bytes:
    """Return the key of a sequence: its tokens, and the images that it reads."""
    digest = hashlib.blake2b(batch.tokens[tokens].tobytes(), digest_size=16)
    for file in () if batch.images is None else batch.images[number]:
        digest.update(hashlib.sha256(file).digest())
    return digest.digest()


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that takes no locks, which not every file system that nodes share has."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?nolock=1", uri=True)


def _fault(connection: sqlite3.Connection, identity: str) -> str | None:
    """Make the tables where there are none; what keeps the file from being of this identity, or None."""
    try:
        connection.executescript(_TABLES)
        (verdict,) = connection.execute("pragma quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # the disk's fault, not the file's
        raise
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    if verdict != "ok":
        return f"is damaged ({verdict})"
    with connection:
        connection.execute("insert into made_by select ? where not exists (select 1 from made_by)", (identity,))
    found = connection.execute("select identity from made_by").fetchall()
    return None if found == [(identity,)] else "is of another model or trainer, or of other options of it"


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Say what to do where the file cannot be read or written."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StorageError(
            f"{path} cannot be read or written: {error}. Make room, or remove it: what it holds is computed again"
        ) from error
