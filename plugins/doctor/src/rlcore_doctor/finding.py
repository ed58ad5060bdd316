"""One thing that does not fit."""

from attrs import frozen


@frozen(kw_only=True)
class Finding:
    """One thing that does not fit."""

    found: str
    remedy: str = ""
    """The command that mends it, or what else does; "" where `found` says it."""
    is_untried: bool = False
    """True where a package of rlcore was not tried with the version of a library, which RLCORE_UNTRIED_VERSIONS lets run."""
    breaks: frozenset[str] = frozenset()
    """Import names of packages that cannot be imported because of it, and through which other imports fail."""
