"""Reads how an episode ended from what a function or a program returns."""

from collections.abc import Mapping
from typing import Any, get_args

from rlcore.spi import EpisodeFailure, FailureKind
from rlcore_workers.functions import brief

KINDS = get_args(FailureKind)
EXPECTED = f"one of {', '.join(KINDS)}, or a mapping with `kind`, and maybe `reason` and `masked`"


def read_failure(value: object) -> EpisodeFailure:
    """Return the failure that "tool" or {"kind": "tool", "reason": text, "masked": bool} stands for. ValueError with all that
    is wrong where it is something else."""
    fields: dict[Any, Any] = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind, reason, masked = fields.pop("kind", None), fields.pop("reason", ""), fields.pop("masked", False)
    faults = [f"the field {brief(name)}" for name in fields]
    if not isinstance(kind, str) or kind not in KINDS:
        faults.append(f"the kind {brief(kind)}")
    if not isinstance(reason, str):
        faults.append(f"the reason {brief(reason)}")
    if not isinstance(masked, bool):
        faults.append(f"masked = {brief(masked)}")
    if faults:
        raise ValueError(f"{', '.join(faults)}; expected {EXPECTED}")
    return EpisodeFailure(kind=kind, reason=reason, masked=masked)  # type: ignore[arg-type]
