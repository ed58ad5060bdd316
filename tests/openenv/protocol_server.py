"""Servers in a thread of the test: OpenEnv's protocol as openenv-core 0.3 speaks it, and a policy behind OpenAI's API."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import WSMsgType, web

from .game import Game

Handle = Callable[[web.Request], Any]
Answer = Callable[[list[dict[str, Any]]], Any]
TOOLS = [{"name": "guess", "description": "Guesses.", "input_schema": {"type": "object", "properties": {"letter": {}}}}]


@contextmanager
def serving(method: str, path: str, handle: Handle) -> Iterator[str]:
    """The address of a server with one route."""
    loop, app = asyncio.new_event_loop(), web.Application()
    app.router.add_route(method, path, handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(120)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(300)
        loop.close()


class GameServer:
    """Plays the game, an instance for each connection, and keeps what it is told."""

    def __init__(self, max_concurrent: int = 1, tools: bool = False, replies: Mapping[str, str | None] | None = None) -> None:
        self.max_concurrent, self.tools, self.replies = max_concurrent, tools, replies or {}
        """`replies` to kinds of messages are sent as they are; where one is None, the server goes away."""
        self.num_open = self.most_open = self.num_refused = 0
        self.heard: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open == self.max_concurrent:
            self.num_refused += 1
            await socket.send_json(error("CAPACITY_REACHED", message="server full", max_sessions=self.max_concurrent))
            await socket.close()
            return socket
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.play(socket)
        finally:
            self.num_open -= 1
        await socket.close()
        return socket

    async def play(self, socket: web.WebSocketResponse) -> None:
        game = Game()
        async for raw in socket:
            assert raw.type is WSMsgType.TEXT
            message = json.loads(raw.data)
            self.heard.append(message)
            kind = message["type"]
            if kind == "close" or (kind in self.replies and self.replies[kind] is None):
                return
            if kind in self.replies:
                await socket.send_str(str(self.replies[kind]))
                continue
            await socket.send_json(self.answer(game, kind, message["data"]))

    def answer(self, game: Game, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            seen = game.reset(data["seed"], data.get("hint", ""))
            return observation({} if self.tools else seen, None, False)
        if self.tools:
            return self.answer_tool(game, data)
        if faults := action_faults(data):
            return error("VALIDATION_ERROR", message="Invalid message", errors=faults)
        try:
            return observation(*game.step(data["message"]))
        except RuntimeError as raised:
            return error("EXECUTION_ERROR", message=str(raised))

    def answer_tool(self, game: Game, data: dict[str, Any]) -> dict[str, Any]:
        if data["type"] == "list_tools":
            return observation({"tools": TOOLS}, None, False)
        if data["tool_name"] != "guess":
            fault = {"error_type": "tool_not_found", "message": f"Unknown tool: {data['tool_name']}"}
            return observation({"tool_name": data["tool_name"], "result": None, "error": fault}, None, False)
        seen, reward, done = game.step(data["arguments"]["letter"])
        result = {"content": [{"type": "text", "text": seen["text"]}], "data": seen["text"], "is_error": False}
        return observation({"tool_name": "guess", "result": result, "error": None}, reward, done)


def action_faults(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What pydantic says of an action that is no message."""
    faults: list[dict[str, Any]] = []
    if "message" not in data:
        faults.append({"type": "missing", "loc": ["message"], "msg": "Field required", "input": data})
    elif not isinstance(data["message"], str):
        faults.append({"type": "string_type", "loc": ["message"], "msg": "Input should be a valid string"})
    extra = [name for name in data if name not in ("message", "metadata")]
    return faults + [{"type": "extra_forbidden", "loc": [name], "msg": "Extra inputs are not permitted"} for name in extra]


def observation(seen: dict[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}}


def error(code: str, **data: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, **data}}


class PolicyServer:
    """Answers by a function of the messages: with text, a whole message, or a status and an error's code."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        body = await request.json()
        self.requests.append(body)
        said = self.answer(body["messages"])
        if isinstance(said, tuple):
            status, code = said
            fault = {"message": f"code is {code}", "code": code}
            return web.json_response({"error": fault}, status=status, headers={"Retry-After": "0"})
        message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        return web.json_response({"choices": [{"message": message}]})
