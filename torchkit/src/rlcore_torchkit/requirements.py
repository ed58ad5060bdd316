"""Whether the libraries that torch backends need are here in versions that serve, found out without importing them."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version

REQUIRED = {"torch": ((2, 11), None), "transformers": ((5, 16), (5, 20))}
"""Distribution to (first version that serves, first that does not), as in this distribution's requirements."""


def missing_requirement() -> str | None:
    """Why torch backends cannot run here, with the remedy, or None."""
    for name, (first, beyond) in REQUIRED.items():
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install {name}"
        try:
            found = version(name)
        except PackageNotFoundError:
            return f"{name} can be imported but has no metadata: install it anew with pip install {name}"
        expected = f">={first[0]}.{first[1]}" + (f",<{beyond[0]}.{beyond[1]}" if beyond else "")
        if _release(found) < first or (beyond is not None and _release(found) >= beyond):
            return f"{name} {found} is installed; expected {expected}: pip install '{name}{expected}'"
    return None


def _release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
