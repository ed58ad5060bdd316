"""TransformerEngine's copies of weights in 8 bits, by rows and by columns, which it keeps from one microbatch to the next."""

from collections.abc import Sequence
from typing import Any


def drop_float8_copies(models: Sequence[Any]) -> None:
    """Free the copies. The next pass makes them anew, as its first microbatch does in any case."""
    for model in models:
        for module in model.modules():
            if copies := getattr(module, "_fp8_workspaces", None):
                copies.clear()
