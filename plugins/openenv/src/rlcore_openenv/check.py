"""Checks of the section, before any server is asked."""

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from rlcore.spi import CheckContext, ConfigError, Problem
from rlcore_openenv.actions import ACTION_FORM, ACTION_KEY
from rlcore_openenv.config import OpenEnvConfig
from rlcore_openenv.views import OBSERVATION_FORM, OBSERVATION_KEY
from rlcore_workers.functions import load_fitting

SECTION = "environment.openenv"


def check(context: CheckContext | None, config: OpenEnvConfig) -> Sequence[Problem]:  # noqa: ARG001 - the form
    """Return what is wrong with addresses and functions."""
    return [*_address_problems(config.urls), *_option_problems(config), *_function_problems(config)]


def _address_problems(urls: Sequence[str]) -> Iterator[Problem]:
    if not urls:
        yield Problem(path=f"{SECTION}.urls", found="no address", expected='one or more, as ["http://localhost:8000"]')
    for url in urls:
        if not _is_address(url):
            expected = "http://HOST:PORT or https://HOST, without user and query; /ws is added to it"
            yield Problem(path=f"{SECTION}.urls", found=repr(url.rpartition("@")[2]), expected=expected)
    if len({url.rstrip("/") for url in urls}) < len(urls):
        yield Problem(path=f"{SECTION}.urls", found="the same address twice", expected="each once")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # ValueError for one that is none
    except ValueError:
        return False
    is_plain = "@" not in url and not parts.query and not parts.fragment and url.split() == [url]
    ends_right = not parts.path.rstrip("/").endswith("/ws")
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and is_plain and ends_right


def _option_problems(config: OpenEnvConfig) -> Iterator[Problem]:
    if (config.action == "function") != (config.action_function is not None):
        found = f"{config.action_function!r} with action = {config.action!r}"
        yield Problem(path=ACTION_KEY, found=found, expected='a function exactly where action = "function"')
    if config.observation_function is not None and config.observation_fields:
        found = "observation_fields beside it"
        yield Problem(path=OBSERVATION_KEY, found=found, expected="one of the two")


def _function_problems(config: OpenEnvConfig) -> Iterator[Problem]:
    forms = (
        (config.action_function, ACTION_KEY, ACTION_FORM, 2),
        (config.observation_function, OBSERVATION_KEY, OBSERVATION_FORM, 1),
    )
    for path, key, expected, num_arguments in forms:
        try:
            if path is not None:
                load_fitting(path, key, expected, num_arguments)
        except ConfigError as error:
            yield from error.problems
