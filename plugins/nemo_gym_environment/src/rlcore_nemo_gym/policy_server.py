"""The policy's server for NeMo Gym's model servers: one address, at which a request's metadata names its episode.

An agent server of NeMo Gym has one model server, whose address is fixed when it starts. What an agent hands on unchanged, from
`/run` to each request that its model server makes, is `responses_create_params.metadata`."""

import asyncio
import json
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web
from attrs import define

from rlcore.spi import SessionEndpoint
from rlcore_nemo_gym.config import SECTION
from rlcore_workers import http_server
from rlcore_workers.http_connections import BODY_S

KEY = "rlcore_episode"
"""The key of metadata that names an episode."""
MAX_BODY_BYTES = 64 * 2**20
TOO_LONG = "context_length_exceeded"
"""The code of a session's refusal of a prompt that leaves no room for an answer."""
_CLIENT = web.AppKey("client", aiohttp.ClientSession)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. ConfigError where that cannot be."""
    remedy = "End what listens there, another run maybe, or choose another port here and in NeMo Gym's openai_base_url."
    return http_server.listening(host, port, (f"{SECTION}.policy_host", f"{SECTION}.policy_port"), remedy)


@define(kw_only=True, eq=False)
class PolicyEpisode:
    """One episode's requests."""

    session: SessionEndpoint
    metadata: Mapping[str, str]
    """The entry that requests must have in their metadata."""
    num_answers: int = 0
    is_too_long: bool = False
    """Whether a request had no room for an answer."""
    refusal: str | None = None
    """The message of the last refusal."""
    num_strangers: int = 0
    """Requests without an episode, of anyone's, since this one began."""
    stray: str | None = None
    """The message about the last request since then for another route and without an episode."""


class PolicyServer:
    """Hands requests on to the sessions of their episodes. It has its address from the start, so that another run finds it
    taken before its model is loaded, and a thread of its own from the first episode on."""

    def __init__(self, host: str, port: int, *, developer_as_system: bool = True) -> None:
        """ConfigError where nothing can listen at the address."""
        self._host, self._port = host, port
        self._developer_as_system = developer_as_system
        self._episodes: dict[str, PolicyEpisode] = {}
        self._starting = threading.Lock()
        self._thread: http_server.ServerThread | None = None
        self._socket: socket.socket | None = listening(host, port)

    @contextmanager
    def episode(self, session: SessionEndpoint) -> Iterator[PolicyEpisode]:
        """An episode whose requests are answered until the block ends. After `close`, ConfigError where nothing can listen at
        the address again."""
        with self._starting:
            if self._thread is None:
                listens, self._socket = self._socket or listening(self._host, self._port), None
                thread = http_server.ServerThread(self._application(), listens, name="rlcore-nemo-gym")
                thread.start()
                self._thread = thread
        key = secrets.token_hex(16)
        self._episodes[key] = PolicyEpisode(session=session, metadata={KEY: key})
        try:
            yield self._episodes[key]
        finally:
            del self._episodes[key]

    def close(self) -> None:
        """Listen no more, until there is another episode."""
        with self._starting:
            if self._thread is not None:
                self._thread.close()
                self._thread = None
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/v1/responses", self._respond)
        application.router.add_route("*", "/{path:.*}", self._refuse_route)
        application.cleanup_ctx.append(_http_client)
        return application

    async def _respond(self, request: web.Request) -> web.Response:
        try:
            body = await _json_of(request)
        except TimeoutError:
            return _error(408, f"the request's body had not come in {BODY_S:g} s; expected all of it. Send it again")
        except (ValueError, RecursionError, web.RequestPayloadError) as error:
            return _error(400, f"the request's body is no JSON that can be read: {error}")
        key = _key(body)
        episode = self._episodes.get(key) if isinstance(key, str) else None
        if episode is None:
            for one in tuple(self._episodes.values()):  # any of them may have sent it
                one.num_strangers += key is None
            found = f"no metadata.{KEY}" if key is None else "an episode that has ended"
            expected = "that of an episode under way, which agents hand on with responses_create_params.metadata"
            return _error(401, f"found {found}; expected {expected}")
        body = {name: value for name, value in body.items() if name != "record"}  # each answer is the episode's
        if self._developer_as_system and isinstance(body.get("input"), list):
            body["input"] = list(map(_as_system, body["input"]))
        return await _handed_on(request.app[_CLIENT], episode, body)

    async def _refuse_route(self, request: web.Request) -> web.Response:
        message = f"found {request.method} {request.path}; expected POST /v1/responses, which is all that the policy answers"
        try:
            key = _key(await _json_of(request))
        except (TimeoutError, ValueError, RecursionError, web.RequestPayloadError):
            key = None
        episode = self._episodes.get(key) if isinstance(key, str) else None
        if episode is not None:
            episode.refusal = message
        else:
            for one in tuple(self._episodes.values()):
                one.stray = message
        return _error(404, message)


async def _json_of(request: web.Request) -> Any:
    """Return a body's JSON, read in limited time, and parsed beside the server's loop."""
    async with asyncio.timeout(BODY_S):
        content = await request.read()
    return await asyncio.to_thread(json.loads, content)


def _key(body: Any) -> Any:
    """The episode's key in a request's metadata, of any type; None without one."""
    metadata = body.get("metadata") if isinstance(body, dict) else None
    return metadata.get(KEY) if isinstance(metadata, dict) else None


def _as_system(item: Any) -> Any:
    return {**item, "role": "system"} if isinstance(item, dict) and item.get("role") == "developer" else item


async def _handed_on(http: aiohttp.ClientSession, episode: PolicyEpisode, body: dict[str, Any]) -> web.Response:
    """Hand a request on to an episode's session. A prompt that leaves no room gets an empty answer, which ends the episode:
    NeMo Gym's own model server for vLLM does the same."""
    session = episode.session
    headers = {"Authorization": f"Bearer {session.api_key}"}
    try:
        async with http.post(
            f"{session.base_url}/responses", json=body | {"model": session.model}, headers=headers
        ) as response:
            status, content, retry_s = response.status, await response.read(), response.headers.get("Retry-After")
    except aiohttp.ClientError as error:
        return _error(410, f"the run's sessions are gone ({type(error).__name__}: {error})")
    if status == web.HTTPOk.status_code:
        episode.num_answers += 1
    elif status != web.HTTPTooManyRequests.status_code:
        fault = _fault(content)
        if fault.get("code") == TOO_LONG:
            episode.is_too_long = True
            return web.json_response(_empty_response(session.model))
        episode.refusal = str(fault.get("message"))
    return web.Response(
        status=status,
        body=content,
        content_type="application/json",
        headers={} if retry_s is None else {"Retry-After": retry_s},
    )


async def _http_client(application: web.Application) -> Any:
    connector, no_limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=no_limit) as http:  # the episode has its own time
        application[_CLIENT] = http
        yield


def _fault(content: bytes) -> Mapping[str, Any]:
    fault: Mapping[str, Any] = json.loads(content)["error"]
    return fault


def _error(status: int, message: str) -> web.Response:
    kind = "authentication_error" if status == web.HTTPUnauthorized.status_code else "invalid_request_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status=status)


def _empty_response(model: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": []}
    message = {
        "type": "message",
        "id": f"msg_{uuid.uuid4().hex}",
        "role": "assistant",
        "status": "incomplete",
        "content": [part],
    }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
