"""The routes of the server, and the errors that they answer with."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from rlcore.spi import SamplingParams
from rlcore_prometheus.run_files import exposition
from rlcore_serve.sessions.bounds import body_too_long, max_body_bytes, read_json
from rlcore_serve.sessions.errors import RequestError, bad_request
from rlcore_serve.sessions.message_reply import MessageReply
from rlcore_serve.sessions.message_requests import read_message_request
from rlcore_serve.sessions.off_loop import off_loop
from rlcore_serve.sessions.replies import Reply
from rlcore_serve.sessions.requests import AnswerRequest, read_request
from rlcore_serve.sessions.response_reply import ResponseReply
from rlcore_serve.sessions.response_requests import read_response_request
from rlcore_serve.sessions.served_model import Prepared, ServedModel
from rlcore_serve.sessions.session import Session, Sessions
from rlcore_serve.sessions.streaming import AnyReply, stream_reply
from rlcore_workers.http_connections import BODY_S
from rlcore_workers.http_server import encoding_problem

LARGE_BYTES = 2**20
MAX_LARGE = 4
"""Most requests with a body of more than LARGE_BYTES that are read at once. Further large ones wait, smaller ones do not."""
ROUTES = (
    "POST /v1/chat/completions, POST /v1/responses, POST /v1/completions, POST /v1/messages, POST /v1/messages/count_tokens "
    "or GET /v1/models"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[object, SamplingParams], AnswerRequest]


class Gate:
    """Limits the number of samples that requests ask for at once, and closes when the server shuts down."""

    def __init__(self, max_waiting: int) -> None:
        """At most `max_waiting` samples are asked for at once."""
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self.is_closed = False

    def enter(self, number: int) -> None:
        """Let in a request for this many samples. RequestError with status 429 or 503 where it has to come again, or not."""
        self.require_open()
        if self._num_waiting and self._num_waiting + number > self._max_waiting:
            found = f"{self._num_waiting} samples are waited for, and at most {self._max_waiting} are taken"
            raise RequestError(429, f"{found}; try again", retry_after_s=1)
        self._num_waiting += number

    def require_open(self) -> None:
        """Raise a RequestError with status 503 while the server shuts down."""
        if self.is_closed:
            raise RequestError(503, "the server ends")

    def leave(self, number: int) -> None:
        """A request that was let in has ended."""
        self._num_waiting -= number


class Routes:
    """Answers requests, on one event loop."""

    def __init__(self, model: ServedModel, sessions: Sessions, gate: Gate) -> None:
        self._model = model
        self._sessions = sessions
        self._gate = gate
        self._max_bytes = max_body_bytes(model.max_sequence_length)
        self._large = asyncio.Semaphore(MAX_LARGE)

    def application(self) -> web.Application:
        """Return the application, with each route below `/v1` and below `/TOKEN/v1`."""
        application = web.Application(client_max_size=self._max_bytes, middlewares=[_errors_as_json])
        for prefix in ("/v1", "/{session}/v1"):
            application.router.add_get(f"{prefix}/models", self._models)
            application.router.add_get(f"{prefix}/models/{{model:.+}}", self._models)
            application.router.add_post(f"{prefix}/chat/completions", partial(self._answer, is_chat=True))
            application.router.add_post(f"{prefix}/completions", partial(self._answer, is_chat=False))
            application.router.add_post(f"{prefix}/responses", self._respond)
            for base in (prefix, f"{prefix}/v1"):  # Anthropic's clients put /v1 behind their base URL
                application.router.add_post(f"{base}/messages", self._message)
                application.router.add_post(f"{base}/messages/count_tokens", self._count_tokens)
        application.router.add_get("/health", self._health)
        if self._model.engine_logs is not None:
            application.router.add_get("/metrics", partial(self._metrics, self._model.engine_logs))
        return application

    async def _health(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        return web.json_response({"status": "ending" if self._gate.is_closed else "ok"})

    async def _metrics(self, logs: Path, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        return web.Response(body=await off_loop(exposition, logs), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        card = {"id": self._model.name, "object": "model", "created": 0, "owned_by": "rlcore"}
        card["max_model_len"] = self._model.max_sequence_length
        if "model" not in request.match_info:
            return web.json_response({"object": "list", "data": [card]})
        self._require_model(request.match_info["model"])
        return web.json_response(card)

    async def _answer(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        return await self._replied(request, partial(read_request, is_chat=is_chat), Reply)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return await self._replied(request, read_response_request, ResponseReply)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._replied(request, read_message_request, MessageReply)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        session, content = await self._opened(request)
        async with session.order:
            return web.json_response({"input_tokens": await off_loop(self._counted, session, content)})

    async def _replied(self, request: web.Request, read: Read, make: Callable[..., AnyReply]) -> web.StreamResponse:
        """Answer a request, whole or as a stream."""
        session, body, prepared = await self._read(request, read)
        wanted, reply = (
            prepared.request,
            make(
                request=prepared.request,
                prompt=prepared.tokens,
                tokenizer=self._model.tokenizer,
                model=self._model.name,
                **body,
            ),
        )
        self._gate.enter(wanted.n)
        try:
            if wanted.stream:
                return await stream_reply(request, reply, self._model, session, prepared)
            answered = await self._model.answer(session, prepared)
            return web.json_response(text=await off_loop(lambda: json.dumps(reply.whole(answered))))
        finally:
            self._gate.leave(wanted.n)

    async def _read(self, request: web.Request, read: Read) -> tuple[Session, dict[str, Any], Prepared]:
        """Return a request's session, its JSON where the reply repeats it, and the sample requests."""
        is_large = request.content_length is None or request.content_length > LARGE_BYTES
        async with self._large if is_large else nullcontext():
            session, content = await self._opened(request)
            async with session.order:
                return await off_loop(self._prepared, session, content, read)

    async def _opened(self, request: web.Request) -> tuple[Session, bytes]:
        """Return the session of a request and its body."""
        session, size = self._session(request), request.content_length
        self._gate.require_open()
        if size is not None and size > self._max_bytes:
            raise body_too_long(size, self._max_bytes)
        if (problem := encoding_problem(request)) is not None:
            raise bad_request([problem])
        return session, await self._body(request)

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError as error:
            message = f"the request's body had not come in {BODY_S:g} s; expected all of it. Send it again"
            raise RequestError(408, message) from error
        except web.RequestPayloadError as error:  # a body in chunks that are none
            raise RequestError(400, f"the request's body cannot be read: {error}") from error
        except web.HTTPRequestEntityTooLarge as error:  # a body without Content-Length
            raise body_too_long(None, self._max_bytes) from error

    def _prepared(self, session: Session, content: bytes, read: Read) -> tuple[Session, dict[str, Any], Prepared]:
        body = read_json(content)
        wanted = self._wanted(session, body, read)
        repeated = {"body": body} if read is read_response_request else {}
        return session, repeated, self._model.prepare(session, wanted)

    def _counted(self, session: Session, content: bytes) -> int:
        """Count the tokens of a request of Anthropic's API, which names no number of tokens to generate."""
        body = read_json(content)
        wanted = self._wanted(session, {"max_tokens": 1, **body} if isinstance(body, dict) else body, read_message_request)
        return self._model.count_tokens(session, wanted)

    def _wanted(self, session: Session, body: object, read: Read) -> AnswerRequest:
        wanted = read(body, session.sampling or self._model.sampling)
        self._require_model(wanted.model)
        return wanted

    def _session(self, request: web.Request) -> Session:
        key = request.headers.get("X-Api-Key")  # of Anthropic's clients
        shown = request.headers.get("Authorization") or (None if key is None else f"Bearer {key}")
        return self._sessions.find(request.match_info.get("session"), shown)

    def _require_model(self, name: str) -> None:
        if name != self._model.name:
            message = f"model: found {name!r:.100}; this server has {self._model.name!r}"
            raise RequestError(404, message, code="model_not_found")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return web.json_response(_body(request, error), status=error.status, headers=error.headers())
    except web.HTTPException as error:  # no such route, a wrong method, a body over the limit
        message = error.text or error.reason
        if error.status in (404, 405):
            route = f"{request.method} {request.path[max(request.path.find('/v1'), 0) :]}"  # without a session's token
            message = f"found {route}; expected {ROUTES}, which are all that this server has"
        return web.json_response(_body(request, RequestError(error.status, message)), status=error.status)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic in a native library is no Exception, and a SystemExit would end the server
        failed = RequestError(500, f"the server failed: {type(error).__name__}: {error}")
        return web.json_response(_body(request, failed), status=500)


def _body(request: web.Request, error: RequestError) -> dict[str, Any]:
    """Return an error in the form of the API that a request is of."""
    return error.message_body() if request.path.endswith(("/messages", "/messages/count_tokens")) else error.body()
