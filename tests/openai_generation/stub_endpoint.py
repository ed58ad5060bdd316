"""An endpoint that answers as a test says: what servers do wrong, or not at all."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from attrs import define, field

Answer = Callable[[dict[str, Any]], Any]
LIMIT = 64


def token(number: int, logprob: float = -0.5, reason: str | None = None, **changes: Any) -> dict[str, Any]:
    """One event of a stream, with one token."""
    choice = {"text": f"t{number} ", "token_ids": [number], "logprobs": {"token_logprobs": [logprob]}, "finish_reason": reason}
    return {"choices": [choice | changes]}


def counted(body: dict[str, Any]) -> list[dict[str, Any]]:
    """As many tokens as are asked for, each the seed; the only one among one is certain."""
    last = body["max_tokens"] - 1
    logprob = 0.0 if body["top_k"] == 1 else -0.5
    return [token(body["seed"], logprob, "length" if number == last else None) for number in range(last + 1)]


@define(kw_only=True, eq=False)
class Stub:
    """The endpoint's answers, and the requests that it got."""

    answer: Answer = counted
    """Called with a request's JSON: events to send and seconds to wait, or what a response is made of, maybe awaited."""
    models: list[dict[str, Any]] = field(factory=lambda: [{"id": "policy", "max_model_len": LIMIT}])
    asked: list[dict[str, Any]] = field(factory=list)
    keys: list[str | None] = field(factory=list)
    most_at_once: int = 0
    _at_once: int = 0

    async def list_models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"data": self.models})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            found = self.answer(body)
            found = await found if asyncio.iscoroutine(found) else found
        finally:
            self._at_once -= 1
        if isinstance(found, dict):
            return web.Response(**found)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in found:
            if isinstance(event, float):
                await asyncio.sleep(event)
                continue
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        await response.write_eof()
        return response


@contextmanager
def listening(stub: Stub) -> Iterator[str]:
    """Answer until the block ends; the API's address."""
    loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    address: list[str] = []

    async def serve() -> None:
        application = web.Application()
        application.router.add_get("/v1/models", stub.list_models)
        application.router.add_post("/v1/completions", stub.complete)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        ready.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
