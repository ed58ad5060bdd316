"""Environment variables by which a program finds its session."""

import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from rlcore.secrets import child_environment
from rlcore.spi import SessionEndpoint


def session_variables(session: SessionEndpoint, names: Iterable[str]) -> dict[str, str]:
    """Return the environment of a program that asks a session: that of `child_environment`, and the session's address."""
    direct = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(session.base_url).hostname)
    return {
        **child_environment(names),
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
        # a proxy would look for the session on its own machine
        **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, direct))),
    }
