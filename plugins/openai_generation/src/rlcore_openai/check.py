"""Check the section before any request to an endpoint."""

import os
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from rlcore.spi import CheckContext, Problem
from rlcore_openai.config import OpenAIConfig

SECTION = "generator.openai"


def check(context: CheckContext, config: OpenAIConfig) -> Sequence[Problem]:  # noqa: ARG001 - the form
    """Return what is wrong with addresses and key."""
    return list(_problems(config))


def _problems(config: OpenAIConfig) -> Iterator[Problem]:
    for url in config.base_urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            expected = "an address that begins with http:// or https://, without a user"
            yield Problem(path=f"{SECTION}.base_urls", found=_shown(url), expected=expected)
        elif parts.scheme == "http" and config.api_key_env is not None and not is_loopback(parts.hostname):
            yield Problem(
                path=f"{SECTION}.base_urls",
                found=f"{url}, with api_key_env",
                expected="https://: the key would travel for everyone to read",
                remedy="Use https, or reach the endpoint through this machine, such as by a tunnel of ssh.",
            )
    bare = [url.rstrip("/") for url in config.base_urls]
    if len(set(bare)) < len(bare):
        yield Problem(path=f"{SECTION}.base_urls", found="the same address twice", expected="each once")
    if config.api_key_env is not None and not os.environ.get(config.api_key_env):
        found = f"{config.api_key_env}, which is not set"
        yield Problem(path=f"{SECTION}.api_key_env", found=found, expected="a variable of the environment")


def is_loopback(host: str) -> bool:
    """Return whether what is sent to a host stays on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(url: str) -> str:
    """An address without the password that it may have."""
    return repr(url if "@" not in url else "…@" + url.rpartition("@")[2])
