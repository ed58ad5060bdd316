"""A connection to an OpenEnv server: an instance of its environment, by messages over a WebSocket."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeGuard

import aiohttp
from attrs import frozen

from rlcore.reading import parse_json
from rlcore.spi import RewardError, fails_as

Request = Literal["reset", "step"]
CLOSE_S = 2.0
"""Most seconds that a server takes to end an episode."""
MAX_MESSAGE_BYTES = 100 * 2**20
"""As in OpenEnv's own client: observations may be pages or screens."""
SHOWN = 300
INVALID, FULL = "VALIDATION_ERROR", "CAPACITY_REACHED"
_FORM = '{"type": "observation", "data": {"observation": {…}, "reward": number or null, "done": true or false}}'


@frozen(kw_only=True, eq=False)
class Observed:
    """A server's reply to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class RefusedError(RewardError):
    """The server replied with an error."""

    def __init__(self, message: str, *, code: str, faults: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.code = code
        """One of OpenEnv's, such as `INVALID`."""
        self.faults = faults
        """Pydantic's faults of an action that does not fit: mappings with `type`, `loc` and `msg`."""


class Connection:
    """One episode's end of the WebSocket."""

    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._server = f"the OpenEnv server {url}"
        self._socket = socket

    async def reset(self, fields: Mapping[str, Any]) -> Observed:
        """Begin the episode. RewardError where the server goes away or replies something else; RefusedError for an error."""
        return await self._ask("reset", fields)

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Take an action. Errors are those of `reset`."""
        return await self._ask("step", action)

    async def end(self) -> None:
        """Say that the episode is over and wait until the server has made room for the next."""
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.send_json({"type": "close"})
                while (await self._socket.receive()).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    pass

    async def _ask(self, request: Request, data: Mapping[str, Any]) -> Observed:
        with suppress(ConnectionError):  # the reason of a server that has closed is still to be read
            await self._socket.send_json({"type": request, "data": data})
        message = await self._socket.receive()
        with fails_as("infrastructure"):
            if message.type is aiohttp.WSMsgType.ERROR:
                raise RewardError(f"{self._server}: the connection broke at a {request}: {message.data}")
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                raise RewardError(
                    f"{self._server} closed the connection (code {self._socket.close_code}); expected its reply to a "
                    f"{request}. Its own output says why"
                )
        return self._read(request, message.data)

    def _read(self, request: Request, text: str | bytes) -> Observed:
        reply: Any = None
        with suppress(ValueError):
            reply = parse_json(text)
        match reply:
            case {"type": "error", "data": dict(data)}:
                raise self._refusal(request, data)
            case {"type": "observation", "data": {"observation": dict(observation), **rest}}:
                reward, done = rest.get("reward"), rest.get("done", False)
                if isinstance(done, bool) and (reward is None or _is_finite(reward)):
                    return Observed(observation=observation, reward=None if reward is None else float(reward), done=done)
        raise RewardError(f"{self._server} replied to a {request} with {text[:SHOWN]!r}; expected {_FORM}")

    def _refusal(self, request: Request, data: Mapping[str, Any]) -> RefusedError:
        code, errors = str(data.get("code", "no code")), data.get("errors", ())
        faults = [fault for fault in errors if isinstance(fault, Mapping)] if isinstance(errors, list) else []
        said = "; ".join([str(data.get("message", "no message")), *map(fault_text, faults)])
        remedy = ". Lower environment.openenv.max_concurrent, or raise the server's max_concurrent_envs" if code == FULL else ""
        return RefusedError(f"{self._server} refused a {request}: {said[:SHOWN]} ({code}){remedy}", code=code, faults=faults)


@asynccontextmanager
async def connected(http: aiohttp.ClientSession, url: str, timeout_s: float) -> AsyncIterator[Connection]:
    """A connection, closed at the end. RewardError where there is no such server."""
    with fails_as("infrastructure"):
        socket = await _socket(http, url, timeout_s)
    connection = Connection(url, socket)
    try:
        yield connection
        await connection.end()
    finally:
        await socket.close()


async def _socket(http: aiohttp.ClientSession, url: str, timeout_s: float) -> aiohttp.ClientWebSocketResponse:
    remedy = "Start the server, or correct environment.openenv.urls"
    limits = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
    try:
        async with asyncio.timeout(timeout_s):
            return await http.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=MAX_MESSAGE_BYTES, timeout=limits)
    except TimeoutError as error:
        raise RewardError(f"the OpenEnv server {url} did not answer within {timeout_s:g} s. {remedy}") from error
    except aiohttp.WSServerHandshakeError as error:
        found = f"the server {url} has no OpenEnv WebSocket at /ws: status {error.status}"
        raise RewardError(f"{found}. {remedy}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise RewardError(f"no OpenEnv server at {url} ({type(error).__name__}: {error}). {remedy}") from error


def fault_text(fault: Mapping[str, Any]) -> str:
    """Return what pydantic says of one field."""
    location = fault.get("loc")
    place = ".".join(map(str, location)) if isinstance(location, list | tuple) else ""
    return f"{place}: {fault.get('msg', 'does not fit')}" if place else str(fault.get("msg", "does not fit"))


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, bool | int | float) and abs(value) < float("inf")
