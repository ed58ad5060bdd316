"""What rows hold, as one number: whether a resumed run reads those that it began with."""

import datetime
import hashlib
import json
from collections.abc import Iterable
from decimal import Decimal

import numpy as np

from rlcore.spi import Row


def rows_digest(rows: Iterable[Row]) -> str:
    """SHA-256 of the rows in their order, each with the names and values of its fields. Of a value that is neither JSON's nor
    a table's, its class alone counts."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(dict(row), skipkeys=True, default=_plain).encode(errors="surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal):
        return str(value)
    return type(value).__qualname__
