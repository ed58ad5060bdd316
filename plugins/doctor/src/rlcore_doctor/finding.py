"""One thing that does not fit."""

from attrs import frozen


@frozen(kw_only=True)
class Finding:
    """One thing that does not fit."""

    found: str
    remedy: str = ""
    """The command that mends it, or what else does; "" where `found` says it."""
