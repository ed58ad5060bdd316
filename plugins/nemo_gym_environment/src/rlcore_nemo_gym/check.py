"""Checks of the section, and of NeMo Gym's servers."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp

from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckContext, ConfigError, DataError, Problem
from rlcore_nemo_gym.agent_servers import OK, agent_addresses, bounded_text, instances_url, listed
from rlcore_nemo_gym.config import SECTION, NemoGymConfig
from rlcore_nemo_gym.policy_server import listening
from rlcore_nemo_gym.rows import agent_of, read_rows

ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:[1-9]\d{0,4})?/?")
TIMEOUT_S = 5.0
"""Most seconds of a whole reply."""
MAX_LIST_BYTES = 8 * 2**20
_REMEDY = "Start NeMo Gym, or correct the address."


def check(context: CheckContext | None, config: NemoGymConfig) -> Sequence[Problem]:  # noqa: ARG001 - the form
    """Return what is wrong with files, addresses and servers."""
    return [*_file_problems(config), *_port_problems(config), *_server_problems(config)]


def _files(config: NemoGymConfig) -> Mapping[str, Sequence[str]]:
    return {f"{SECTION}.train_files": config.train_files, f"{SECTION}.evaluation_files": config.evaluation_files}


def _file_problems(config: NemoGymConfig) -> Iterator[Problem]:
    for path, files in _files(config).items():
        for file in files:
            if not expanded(file).is_file():
                yield Problem(path=path, found=f"{file!r}, which is no file", expected="a JSONL file of NeMo Gym")


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
            _get(url)  # any status will do: an agent server has no page of its own in all versions
        except (aiohttp.ClientError, OSError, ValueError) as error:
            found = f"{url}, which does not answer as one ({_said(error)})"
            yield Problem(path=path, found=found, expected="an agent server", remedy=_REMEDY)


def _head_problems(config: NemoGymConfig, path: str) -> Iterator[Problem]:
    try:
        status, text = _get(instances_url(config.head_url))
        if status != OK:
            raise ValueError(f"found status {status}")
        agents = agent_addresses(text)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        found = f"{config.head_url}, which has no list of servers ({_said(error)})"
        yield Problem(path=path, found=found, expected="NeMo Gym's head server", remedy=_REMEDY)
        return
    if config.agent is None:
        yield from _row_problems(config, set(agents))
    elif config.agent not in agents:
        expected = f"an agent server that runs: {listed(agents)}"
        yield Problem(path=f"{SECTION}.agent", found=repr(config.agent), expected=expected)


def _row_problems(config: NemoGymConfig, agents: set[str]) -> Iterator[Problem]:
    """Rows whose agent server does not run would fail one by one."""
    remedy = f"Start it with NeMo Gym, or name one for all rows: {SECTION}.agent."
    for path, files in _files(config).items():
        if not all(expanded(file).is_file() for file in files):
            continue
        try:
            named = Counter(agent_of(row) for row in read_rows(files, path)) if files else Counter()
        except DataError as error:
            found, _, expected = str(error).removeprefix(f"{path}: ").removeprefix("found ").partition("; expected ")
            yield Problem(path=path, found=found, expected=expected)
            continue
        for name, number in named.items():
            if name not in agents:
                what = "has no name" if name is None else f"names {name!r}"
                found = f"{number} of {named.total()} rows whose agent_ref {what}"
                yield Problem(path=path, found=found, expected=f"an agent server that runs: {listed(agents)}", remedy=remedy)


def _get(url: str) -> tuple[int, str]:
    """Status and text of a page, past proxies, as episodes are. In a thread, since a caller may have an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _page(url)).result()


async def _page(url: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http,
        http.get(url, allow_redirects=False) as response,
    ):
        return response.status, await bounded_text(response, MAX_LIST_BYTES)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
