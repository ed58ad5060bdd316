"""Address at which the session server of a run listens: this machine's loopback address, or one that other hosts reach."""

import os
from collections.abc import Iterator
from ipaddress import ip_address

from rlcore.spi import ConfigError, Problem
from rlcore_workers.http_server import listening

HOST = "RLCORE_SESSION_HOST"
"""The environment variable of the address; a recipe has no such key, since the address belongs to the driver's machine."""
_REMEDY = f"Set {HOST} to an address of this machine, or leave it out where all agents run here."


def session_host() -> str:
    """Return the address, a loopback one unless HOST names another."""
    return os.environ.get(HOST) or "127.0.0.1"


def host_problems() -> Iterator[Problem]:
    """Find out whether a server can listen there, and agents can be given the address."""
    host = session_host()
    try:
        if ip_address(host).is_unspecified:
            expected = "one address, by which agents reach this machine"
            yield Problem(path=HOST, found=f"{host}, which is every address", expected=expected, remedy=_REMEDY)
            return
    except ValueError:
        pass  # a name
    try:
        listening(host, 0, (HOST, HOST), _REMEDY).close()
    except ConfigError as error:
        (problem,) = error.problems
        yield Problem(path=HOST, found=problem.found, expected="an address of this machine", remedy=_REMEDY)
