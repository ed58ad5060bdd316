"""Computes digests of rows, by which a resumed run detects other data."""

import datetime
import hashlib
import json
from collections.abc import Iterable, Sequence
from decimal import Decimal

import numpy as np
from attrs import frozen

from rlcore.spi import Row

NUM_LOOKED_AT = 256
"""Rows of an environment's own that are looked at: each may take long to make, and they may be millions."""


@frozen(kw_only=True)
class RowDigests:
    """Digests of the rows to train on."""

    read: str | None = None
    """Digest of those that files, the Hub or a program bring; None where there are none, or it is not known."""
    own: str | None = None
    """Digest of some of those that environments bring themselves, and of how many they are; None likewise."""


def rows_digest(rows: Iterable[Row]) -> str:
    """SHA-256 of the rows in their order, each with the names and values of its fields. Of a value that is neither JSON's nor
    a table's, its class alone counts; of a field that holds itself, or too deep values, its name."""
    digest = hashlib.sha256()
    for row in rows:
        fields = dict(row)
        try:
            text = json.dumps(fields, skipkeys=True, default=_plain)
        except (ValueError, RecursionError):
            text = json.dumps(list(map(str, fields)))
        digest.update(text.encode(errors="surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def sampled(rows: Sequence[Row]) -> Iterable[Row]:
    """Return the number of rows, and NUM_LOOKED_AT of them, spread evenly; all where they are no more."""
    yield {"rows": len(rows)}
    for number in np.linspace(0, len(rows) - 1, min(len(rows), NUM_LOOKED_AT)).astype(int).tolist():
        yield rows[number]


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal):
        return str(value)
    return type(value).__qualname__
