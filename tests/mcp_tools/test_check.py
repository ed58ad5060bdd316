"""Checks of `[environment.mcp]`: each problem is named at its key, and no server is started."""

import sys
from typing import Any

import pytest

from rlcore.spi import ConfigError, EnvironmentContext
from rlcore_mcp.check import check
from rlcore_mcp.config import McpConfig, McpServerConfig
from rlcore_mcp.environment import McpEnvironment

COMMAND = (sys.executable, "-c", "raise SystemExit")
URL = "http://127.0.0.1:8000/mcp"


def paths(**options: Any) -> list[str]:
    problems = check(None, McpConfig(servers={"one": McpServerConfig(**options)}))
    return [problem.path.removeprefix("environment.mcp.servers.one") for problem in problems]


PROBLEMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a command": ({"command": COMMAND}, []),
    "an address": ({"url": URL}, []),
    "an address with a key": ({"url": URL, "api_key_env": "PATH"}, []),
    "neither": ({}, [""]),
    "both": ({"command": COMMAND, "url": URL}, [""]),
    "no program": ({"command": ("no-such-program",)}, [".command"]),
    "another scheme": ({"url": "ftp://h/mcp"}, [".url"]),
    "a user": ({"url": "http://user:secret@h/mcp"}, [".url"]),
    "no host": ({"url": "http:///mcp"}, [".url"]),
    "no port": ({"url": "http://h:port/mcp"}, [".url"]),
    "a key that is not set": ({"url": URL, "api_key_env": "RLCORE_UNSET"}, [".api_key_env"]),
    "a key beside a command": ({"command": COMMAND, "api_key_env": "PATH"}, [".api_key_env"]),
    "variables beside an address": ({"url": URL, "pass_environment": ("PATH",)}, [".pass_environment"]),
    "a variable that is not set": (
        {"command": COMMAND, "pass_environment": ("RLCORE_UNSET",)},
        [".pass_environment"],
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_are_at_their_keys(name: str) -> None:
    options, expected = PROBLEMS[name]
    assert paths(**options) == expected


def test_a_reward_function_that_does_not_load_is_at_this_sections_key() -> None:
    config = McpConfig(servers={"one": McpServerConfig(url=URL)}, path="no_such_module:score")
    with pytest.raises(ConfigError) as refused:
        McpEnvironment(EnvironmentContext(seed=0), config)
    assert [problem.path for problem in refused.value.problems] == ["environment.mcp.path"]
