"""The versions of the client that the server speaks with."""

import re

from rlcore_tinker.errors import RequestError

OLDEST, NEWEST = (0, 34), (0, 38)
"""The oldest version of `tinker` whose requests the server reads, and the newest that it is tested with."""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\D.*)?")


def check_version(found: str) -> str | None:
    """Return a warning where the client is newer than what the server is tested with. RequestError for other versions."""
    match = _VERSION.fullmatch(found)
    version = (int(match[1]), int(match[2])) if match else None
    if version is None or version < OLDEST or version[0] > NEWEST[0]:
        raise RequestError(
            f"sdk_version: found {found!r:.60}; expected {_shown(OLDEST)} to {_shown(NEWEST)}, the protocol of this server. "
            f"Run: pip install 'tinker>={_shown(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )
    if version > NEWEST:
        return f"this server is tested with tinker {_shown(OLDEST)} to {_shown(NEWEST)}, and this client is {found:.60}"
    return None


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
