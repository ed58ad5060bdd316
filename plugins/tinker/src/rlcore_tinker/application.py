"""The HTTP application of the protocol: its routes, the key, retries, and errors."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from attrs import frozen

from rlcore_tinker.adapter_pool import AdapterPool
from rlcore_tinker.backend import TrainingSession
from rlcore_tinker.bodies import MAX_BYTES, Bodies
from rlcore_tinker.checkpoint_routes import FILE, CheckpointRoutes
from rlcore_tinker.checkpoints import Checkpoints
from rlcore_tinker.clients import Clients
from rlcore_tinker.errors import RequestError, as_request_error
from rlcore_tinker.models import Models
from rlcore_tinker.promises import KEEP_S, Promises
from rlcore_tinker.sampling import Samplers
from rlcore_tinker.service_routes import HEALTH, ServiceRoutes
from rlcore_tinker.tasks import Tasks
from rlcore_tinker.training_model import ServedModel
from rlcore_tinker.training_routes import TrainingRoutes
from rlcore_tinker.weights import Weights

PREFIX = "/api/v1"
POLLS = tuple(f"{PREFIX}/{name}" for name in ("retrieve_future", "retrieve_futures", "telemetry", "session_heartbeat"))
"""Routes whose replies nobody needs twice."""
OPEN = (HEALTH, FILE)
"""Names of the routes without a key: a file's address is signed."""
RETRY_S = 600.0
"""Seconds for which the reply to an idempotency key is kept."""
MAX_KEPT = 65_536
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@frozen(kw_only=True, eq=False)
class Served:
    """The session and the model of an application, and its settings."""

    session: TrainingSession
    model: ServedModel
    directory: Path
    """Where checkpoints are kept."""
    scratch: Path
    """An empty folder for states that are set aside."""
    has_reference: bool
    many_adapters: bool
    """True where the session can train several models, each an adapter."""
    key: str
    """The key that clients have to send."""
    on_error: Callable[[BaseException], object]
    """Called with each error that a request on the session ended with."""
    keep_s: float = KEEP_S
    """Seconds for which results are kept."""


def application(served: Served) -> web.Application:
    """Return the application."""
    bodies, clients, promises = Bodies(), Clients(), Promises(served.keep_s)
    checkpoints = Checkpoints(served.directory)
    weights: Weights | AdapterPool = AdapterPool(served.session, served.scratch)
    if not served.many_adapters:
        weights = Weights(served.session, served.scratch, has_reference=served.has_reference)
    samplers = Samplers(weights, promises, served.model.limits, served.on_error)
    models = Models(served.model, weights, checkpoints, clients, promises, served.on_error)
    made = web.Application(
        client_max_size=MAX_BYTES, middlewares=[_errors_as_json, _Key(served.key).check, _Retries().answer_once]
    )
    for routes in (
        ServiceRoutes(models=models, clients=clients, samplers=samplers, checkpoints=checkpoints, bodies=bodies),
        TrainingRoutes(
            models=models,
            clients=clients,
            samplers=samplers,
            promises=promises,
            checkpoints=checkpoints,
            bodies=bodies,
            tasks=Tasks(),
            on_error=served.on_error,
        ),
        CheckpointRoutes(models=models, checkpoints=checkpoints, bodies=bodies, secret=served.key.encode()),
    ):
        routes.add_to(made.router, PREFIX)
    return made


class _Key:
    """Lets in who shows the key, and addresses that it signed."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("X-API-Key", "").encode("utf-8", "surrogateescape")
        # By the route that was found: a path may hold the name of any other in an escape.
        if request.match_info.route.name not in OPEN and not hmac.compare_digest(shown, self._key):
            found = "another key" if shown else "no key"
            raise RequestError(f"X-API-Key: found {found}; expected the key of this server, in TINKER_API_KEY", status=401)
        return await handler(request)


class _Retries:
    """Answers a request that comes again with the reply of the first one, by the client's idempotency key."""

    def __init__(self) -> None:
        self._replies: dict[str, tuple[float, asyncio.Future[web.Response]]] = {}

    @web.middleware
    async def answer_once(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = request.headers.get("X-Idempotency-Key")
        if key is None or request.method == "GET" or request.path in POLLS:
            return await handler(request)
        self._drop_old()
        place = f"{request.method} {request.path} {key:.200}"
        if place in self._replies:
            return _copied(await asyncio.shield(self._replies[place][1]))
        reply: asyncio.Future[web.Response] = asyncio.get_running_loop().create_future()
        self._replies[place] = time.monotonic(), reply
        try:
            response = await handler(request)
        except BaseException:  # an error is no answer: the next attempt is a first one
            del self._replies[place]
            reply.set_exception(RequestError("the first attempt failed; try again", status=409))
            reply.exception()  # else asyncio logs that nobody retrieved it
            raise
        assert isinstance(response, web.Response)
        reply.set_result(_copied(response))
        return response

    def _drop_old(self) -> None:
        limit = time.monotonic() - RETRY_S
        while self._replies:
            place, (since, reply) = next(iter(self._replies.items()))
            if since >= limit and len(self._replies) < MAX_KEPT:
                return
            if not reply.done():
                return
            del self._replies[place]


def _copied(response: web.Response) -> web.Response:
    """A response with the same status and body: aiohttp sends each once."""
    if response.body is None:
        return web.Response(status=response.status)
    return web.Response(status=response.status, body=response.body, content_type=response.content_type)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # no such route, or a wrong method
        message = error.text or error.reason
        if error.status in (404, 405):
            message = f"found {request.method} {request.path:.200}, which this server does not serve"
        refused = RequestError(message, status=error.status)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a SystemExit would end the server
        refused = as_request_error(error)
    return web.json_response(refused.body(), status=refused.status)
