"""The JSON that commands print for programs."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(record: Mapping[str, Any]) -> str:
    """A record as JSON, whose grammar has no NaN and no infinity: these are null."""
    return json.dumps(_finite(record), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
