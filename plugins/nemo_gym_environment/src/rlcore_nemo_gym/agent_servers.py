"""NeMo Gym's servers as an episode sees them: the head server tells where an agent server is, which runs the episode."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from rlcore.spi import RewardError, fails_as

AGENTS = "responses_api_agents"
OK = 200
_PASSING = (408, 429, 502, 503, 504)
"""States of a server that is busy, or behind a proxy that does not reach it."""
SHOWN = 300
"""Characters of a reply that an error shows."""
MAX_REPLY_BYTES = 100 * 2**20
"""Most bytes of a reply, counted once they are decompressed."""


def agent_addresses(reply: str) -> dict[str, str]:
    """Return the address of each agent server by its name, given what a head server replies at `/server_instances`. ValueError
    where it is something else."""
    try:
        instances = json.loads(reply)
    except RecursionError as error:
        raise ValueError("found JSON that is nested too deeply; expected a list of servers") from error
    if not isinstance(instances, list) or not all(isinstance(one, Mapping) for one in instances):
        raise ValueError(f"found {instances!r:.80}; expected a list of servers")
    agents = [one for one in instances if one.get("server_type") == AGENTS]
    return {str(one.get("process_name")): str(one["url"]) for one in agents if one.get("url")}


def listed(names: Iterable[str]) -> str:
    """Return names as errors show them."""
    return ", ".join(map(repr, sorted(names))) or "none"


async def find_agent(http: aiohttp.ClientSession, head_url: str, name: str) -> str:
    """Return the address of an agent server. RewardError where the head server does not answer, or knows no such server, as
    while it starts again."""
    where = f"NeMo Gym's head server {head_url}"
    status, text = await _asked(http, "GET", instances_url(head_url), where)
    try:
        if status != OK:
            raise ValueError(f"found status {status}")
        agents = agent_addresses(text)
    except ValueError as error:
        raise RewardError(f"{where} has no list at /server_instances: {error}. {_REMEDY}") from error
    if name not in agents:
        known = listed(agents)
        raise RewardError(f"{where} has no agent server {name!r}; it has {known}. Start it with NeMo Gym, or name another")
    return agents[name]


def instances_url(head_url: str) -> str:
    """Return where a head server has its list of servers."""
    return f"{head_url.rstrip('/')}/server_instances"


async def run_episode(http: aiohttp.ClientSession, url: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an agent server replies once it has run and verified a row. RewardError where it does not."""
    where = f"the agent server {url}"
    status, text = await _asked(http, "POST", f"{url.rstrip('/')}/run", where, row)
    if status != OK:
        with fails_as("infrastructure" if status in _PASSING else "environment"):
            raise RewardError(f"{where} failed: status {status}: {text:.{SHOWN}}")
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{where} replied no JSON that can be read: {text:.{SHOWN}}") from error
    if not isinstance(reply, dict):
        raise RewardError(f"{where} replied {text:.{SHOWN}}; expected a JSON object with `reward`")
    return reply


async def bounded_text(response: aiohttp.ClientResponse, most: int) -> str:
    """Return a reply's text. ValueError where it has more bytes."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > most:
            raise ValueError(f"found a reply of more than {most} bytes; expected at most as many")
    return content.decode(errors="replace")


_REMEDY = "Start NeMo Gym, or correct environment.nemo_gym"


async def _asked(
    http: aiohttp.ClientSession, method: str, url: str, where: str, body: Mapping[str, Any] | None = None
) -> tuple[int, str]:
    """Status and text of a reply. A redirect is a reply like others: the row has its answer and the episode's key in it."""
    try:
        async with http.request(method, url, json=body, allow_redirects=False) as response:
            return response.status, await bounded_text(response, MAX_REPLY_BYTES)
    except aiohttp.ClientConnectorError as error:
        with fails_as("infrastructure"):
            raise RewardError(f"{where} is not there ({error}). {_REMEDY}") from error
    except (aiohttp.ClientError, OSError) as error:
        with fails_as("infrastructure"):
            raise RewardError(f"{where} went away ({type(error).__name__}: {error})") from error
    except ValueError as error:
        raise RewardError(f"{where} does not reply as one: {error}") from error
