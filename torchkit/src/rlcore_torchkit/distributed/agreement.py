"""Run steps that succeed on all ranks or fail on all: a rank that went on alone would wait for the others forever."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rlcore.spi.errors import ProblemsError, RlcoreError

Result = TypeVar("Result")


def together(action: Callable[[], Result]) -> Result:
    """Return the result of `action`; where it raises on any rank, every rank raises the first such error, an RlcoreError as it
    is. A process without a group is the only rank."""
    if not dist.is_initialized():
        return action()
    error: tuple[type[RlcoreError], Any] | None = None
    result = None
    try:
        result = action()
    except RlcoreError as found:
        error = (type(found), found.problems if isinstance(found, ProblemsError) else str(found))
    except Exception as found:  # the others would wait, whatever it is
        error = (RlcoreError, f"rank {dist.get_rank()}: {type(found).__name__}: {found}")
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((found for found in errors if found is not None), None)
    if first is not None:
        kind, content = first
        raise kind(content)
    return result  # type: ignore[return-value]


def first_rank(action: Callable[[], Result]) -> Result:
    """The result of `action` on rank 0, which alone runs it, or its RlcoreError, on every rank."""
    if not dist.is_initialized():
        return action()
    results = [together(lambda: action() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]
