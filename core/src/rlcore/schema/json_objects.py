"""A hook of json.loads that refuses repeated keys, of which json.loads itself keeps the last."""

from collections import Counter
from collections.abc import Sequence
from typing import Any


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as an `object_pairs_hook`. ValueError names a key that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"found the key {key!r:.40} {count} times in one object; expected it once")
    return found
