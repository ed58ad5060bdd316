"""NeMo Gym's servers as an episode sees them: the head server tells where an agent server is, which runs the episode."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rlcore.spi import PluginError, RewardError

AGENTS = "responses_api_agents"
OK = 200
SHOWN = 300
"""Characters of a reply that an error shows."""


def agent_addresses(instances: object) -> dict[str, str]:
    """Return the address of each agent server by its name, given what a head server has at `/server_instances`. ValueError
    where it is something else."""
    if not isinstance(instances, list) or not all(isinstance(one, Mapping) for one in instances):
        raise ValueError(f"found {instances!r:.80}; expected a list of servers")
    agents = [one for one in instances if one.get("server_type") == AGENTS]
    return {str(one.get("process_name")): str(one["url"]) for one in agents if one.get("url")}


async def find_agent(http: aiohttp.ClientSession, head_url: str, name: str) -> str:
    """Return the address of an agent server. RewardError where the head server does not answer, PluginError where it knows no
    such server."""
    where = f"NeMo Gym's head server {head_url}"
    status, text = await _asked(http, "GET", f"{head_url.rstrip('/')}/server_instances", where)
    try:
        if status != OK:
            raise ValueError(f"found status {status}")
        agents = agent_addresses(json.loads(text))
    except ValueError as error:
        raise RewardError(f"{where} has no list at /server_instances: {error}. {_REMEDY}") from error
    if name not in agents:
        known = ", ".join(map(repr, sorted(agents))) or "none"
        raise PluginError(f"{where} has no agent server {name!r}; it has {known}. Start it with NeMo Gym, or name another")
    return agents[name]


async def run_episode(http: aiohttp.ClientSession, url: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an agent server replies once it has run and verified a row. RewardError where it does not."""
    where = f"the agent server {url}"
    status, text = await _asked(http, "POST", f"{url.rstrip('/')}/run", where, row)
    if status != OK:
        raise RewardError(f"{where} failed: status {status}: {text:.{SHOWN}}")
    try:
        reply = json.loads(text)
    except ValueError as error:
        raise RewardError(f"{where} replied no JSON: {text:.{SHOWN}}") from error
    if not isinstance(reply, dict):
        raise RewardError(f"{where} replied {text:.{SHOWN}}; expected a JSON object with `reward`")
    return reply


_REMEDY = "Start NeMo Gym, or correct environment.nemo_gym"


async def _asked(
    http: aiohttp.ClientSession, method: str, url: str, where: str, body: Mapping[str, Any] | None = None
) -> tuple[int, str]:
    try:
        async with http.request(method, url, json=body) as response:
            return response.status, await response.text(errors="replace")
    except aiohttp.ClientConnectorError as error:
        raise RewardError(f"{where} is not there ({error}). {_REMEDY}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise RewardError(f"{where} went away ({type(error).__name__}: {error})") from error
