"""Checks of the recipe's section, beyond types."""

import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

from attrs import evolve

from rlcore.secrets import unset_problems
from rlcore.spi import CheckContext, Note, Problem
from rlcore_mcp.config import McpConfig, McpServerConfig, reward_config
from rlcore_rewards import environment as rewards

SECTION = "environment.mcp"


def check(_context: CheckContext | None, config: McpConfig) -> list[Problem | Note]:
    """Problems of `[environment.mcp]` and notes on its reward functions. No server is started."""
    servers = [problem for name, server in config.servers.items() for problem in _server(f"{SECTION}.servers.{name}", server)]
    return [*servers, *(_renamed(one) for one in rewards.check(None, reward_config(config)))]


def _server(path: str, config: McpServerConfig) -> Iterator[Problem]:
    if bool(config.command) == (config.url is not None):
        found = "both command and url" if config.command else "neither command nor url"
        yield Problem(path=path, found=found, expected="one of the two")
    if config.command and shutil.which(config.command[0]) is None:
        yield Problem(path=f"{path}.command", found=f"{config.command[0]!r}, which is no program", expected="a program on PATH")
    if config.url is not None and not _is_address(config.url):
        found = repr(config.url.rpartition("@")[2])
        yield Problem(path=f"{path}.url", found=found, expected="http://HOST:PORT/PATH or https://HOST/PATH, without user")
    if config.url is None and config.api_key_env is not None:
        remedy = "Name the variable in pass_environment."
        yield Problem(path=f"{path}.api_key_env", found=config.api_key_env, expected="none beside command", remedy=remedy)
    elif config.api_key_env is not None and not os.environ.get(config.api_key_env):
        found = f"{config.api_key_env}, which is not set"
        yield Problem(path=f"{path}.api_key_env", found=found, expected="a variable of the environment")
    if config.url is not None and config.pass_environment:
        found = ", ".join(config.pass_environment)
        yield Problem(path=f"{path}.pass_environment", found=found, expected="none beside url")
    else:
        yield from unset_problems(path, config.pass_environment)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # ValueError for one that is none
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and "@" not in url and url.split() == [url]


def _renamed(found: Problem | Note) -> Problem | Note:
    """A problem of the environment `function`, at the key of this section."""
    return evolve(found, path=found.path.replace(rewards.SECTION, SECTION, 1))
