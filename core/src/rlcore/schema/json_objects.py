"""A hook of json.loads that refuses keys with several values, of which json.loads itself keeps the last."""

import json
from collections.abc import Sequence
from typing import Any


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as an `object_pairs_hook`. ValueError names a key that it has with different values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = [(key, value) for key, value in pairs if value is not found[key]]
        for key, value in repeated:
            if json.dumps(value, sort_keys=True) != json.dumps(found[key], sort_keys=True):  # since 1 == True
                raise ValueError(f"found the key {key!r:.40} with different values in one object; expected one value")
    return found
