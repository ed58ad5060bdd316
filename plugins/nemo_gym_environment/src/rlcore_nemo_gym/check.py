"""What is wrong with the section, and whether NeMo Gym's servers answer."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlcore.spi import CheckContext, ConfigError, Problem
from rlcore_nemo_gym.agent_servers import agent_addresses
from rlcore_nemo_gym.config import NemoGymConfig
from rlcore_nemo_gym.server_thread import SECTION, listening

ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:[1-9]\d{0,4})?/?")
TIMEOUT_S = 5.0
_REMEDY = "Start NeMo Gym, or correct the address."
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Past proxies, as episodes are."""


def check(context: CheckContext | None, config: NemoGymConfig) -> Sequence[Problem]:  # noqa: ARG001 - the form
    """Return what is wrong with files, addresses and servers."""
    return [*_file_problems(config), *_port_problems(config), *_server_problems(config)]


def _file_problems(config: NemoGymConfig) -> Iterator[Problem]:
    for name, files in (("train_files", config.train_files), ("evaluation_files", config.evaluation_files)):
        for file in files:
            if not Path(file).expanduser().is_file():
                yield Problem(
                    path=f"{SECTION}.{name}", found=f"{file!r}, which is no file", expected="a JSONL file of NeMo Gym"
                )


def _port_problems(config: NemoGymConfig) -> Iterator[Problem]:
    try:
        listening(config.policy_host, config.policy_port).close()
    except ConfigError as error:
        yield from error.problems


def _server_problems(config: NemoGymConfig) -> Iterator[Problem]:
    if config.agent is not None and config.agent_url is not None:
        found = f"{config.agent_url!r} beside agent = {config.agent!r}"
        yield Problem(path=f"{SECTION}.agent_url", found=found, expected="one of the two")
        return
    name, url = ("head_url", config.head_url) if config.agent_url is None else ("agent_url", config.agent_url)
    path = f"{SECTION}.{name}"
    if not ADDRESS.fullmatch(url):
        yield Problem(path=path, found=repr(url.rpartition("@")[2]), expected="http://HOST:PORT, without user, query and /run")
    elif config.agent_url is None:
        yield from _head_problems(config, path)
    else:
        try:
            _get(url)
        except urllib.error.HTTPError as error:  # any answer will do: an agent server has no page of its own in all versions
            error.close()
        except OSError as error:
            yield Problem(
                path=path, found=f"{url}, which does not answer ({error})", expected="an agent server", remedy=_REMEDY
            )


def _head_problems(config: NemoGymConfig, path: str) -> Iterator[Problem]:
    expected = "NeMo Gym's head server"
    try:
        agents = agent_addresses(json.loads(_get(f"{config.head_url.rstrip('/')}/server_instances")))
    except (OSError, ValueError) as error:
        found = f"{config.head_url}, which has no list of servers ({error})"
        yield Problem(path=path, found=found, expected=expected, remedy=_REMEDY)
        return
    if config.agent is not None and config.agent not in agents:
        known = ", ".join(map(repr, sorted(agents))) or "none"
        yield Problem(path=f"{SECTION}.agent", found=repr(config.agent), expected=f"an agent server that runs: {known}")


def _get(url: str) -> bytes:
    with _DIRECT.open(url, timeout=TIMEOUT_S) as response:
        content: bytes = response.read()
        return content
