"""NeMo Gym's servers in a thread of the test: head, agent, model and resources server, as those of nemo-gym 0.4 speak."""

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
from aiohttp import web

AGENT = "double_simple_agent"
TOOL = {
    "type": "function",
    "name": "double",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "strict": True,
}


def free_port() -> int:
    """A port at which nothing listens, below those that Linux gives to connections and to servers without one."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def row(text: str = "what is twice 4?", expected: str = "8") -> dict[str, Any]:
    """A row as NeMo Gym's data sets have them."""
    params = {
        "input": [{"role": "user", "content": text}],
        "tools": [TOOL],
        "temperature": 0.3,
        "parallel_tool_calls": False,
        "metadata": {"source": "test"},
    }
    return {"responses_create_params": params, "expected": expected, "agent_ref": {"type": "any", "name": AGENT}}


class Gym:
    """All servers at one address. The policy's address is the model server's `openai_base_url`."""

    def __init__(self, policy_url: str) -> None:
        self.url = ""
        self.policy_url = policy_url
        self.policy_path = "/responses"
        """Where the model server asks the policy."""
        self.tasks: list[dict[str, Any]] = []
        """What the agent server was given."""
        self.asked: list[dict[str, Any]] = []
        """What the model server was given."""
        self.reply: Any = None
        """What the agent server replies in place of running: a status and a text."""
        self.verdict: dict[str, Any] = {}
        """What the resources server says besides, or in place of, its own verdict."""
        self.policy_input: list[Any] = []
        """What the agent puts in front of a row's input."""
        self.instances: Any = None
        """What the head server replies in place of its list."""
        self.hands_on_metadata = True
        self.judges_with_policy = False
        self.num_running = 0
        self._called: dict[str, int] = {}
        """Calls of the tool in each session of the resources server, by its cookie."""

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/server_instances", self._instances)
        for path, handle in (
            ("/run", self._run),
            ("/v1/responses", self._respond),
            ("/seed_session", self._seed),
            ("/double", self._double),
            ("/verify", self._verify),
        ):
            application.router.add_post(path, handle)
        return application

    async def _instances(self, request: web.Request) -> web.Response:
        if self.instances is not None:
            return web.Response(text=self.instances)
        agent = {"process_name": AGENT, "server_type": "responses_api_agents", "name": "simple_agent", "url": self.url}
        other = {"process_name": "policy_model", "server_type": "responses_api_models", "name": "openai_model", "url": self.url}
        return web.json_response([other, agent])

    async def _run(self, request: web.Request) -> web.Response:
        """As NeMo Gym's simple_agent."""
        self.num_running += 1
        try:
            task = await request.json()
            self.tasks.append(task)
            if self.reply is not None:
                status, content, *headers = self.reply
                content = content.encode() if isinstance(content, str) else content
                return web.Response(status=status, body=content, headers=dict(headers))
            async with aiohttp.ClientSession(self.url, cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
                return web.json_response(await self._episode(http, task))
        finally:
            self.num_running -= 1

    async def _episode(self, http: aiohttp.ClientSession, task: dict[str, Any]) -> dict[str, Any]:
        await _posted(http, "/seed_session", task)
        params, outputs = task["responses_create_params"], list(self.policy_input)
        while True:
            response = await _posted(http, "/v1/responses", params | {"input": params["input"] + outputs})
            outputs += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if response["incomplete_details"] or not calls:
                break
            for call in calls:
                result = json.dumps(await _posted(http, f"/{call['name']}", json.loads(call["arguments"])))
                outputs.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
        said = outputs[len(self.policy_input) :]
        reply: dict[str, Any] = await _posted(http, "/verify", task | {"response": response | {"output": said}})
        return reply

    async def _respond(self, request: web.Request) -> web.Response:
        """As NeMo Gym's openai_model."""
        body = await request.json()
        if not self.hands_on_metadata:
            del body["metadata"]
        self.asked.append(body)
        async with aiohttp.ClientSession() as http:
            return web.json_response(await _posted(http, f"{self.policy_url}{self.policy_path}", body | {"model": "any"}))

    async def _seed(self, request: web.Request) -> web.Response:
        response, key = web.json_response({}), str(len(self._called))
        self._called[key] = 0
        response.set_cookie("session", key)
        return response

    async def _double(self, request: web.Request) -> web.Response:
        self._called[request.cookies["session"]] += 1
        return web.json_response({"doubled": 2 * (await request.json())["n"]})

    async def _verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.judges_with_policy:
            async with aiohttp.ClientSession() as http:
                await _posted(http, f"{self.policy_url}/responses", {"model": "any", "input": "is it right?"})
        texts = [item["content"][0]["text"] for item in body["response"]["output"] if item["type"] == "message"]
        is_right = bool(texts) and body["expected"] in texts[-1]
        figures = {"called": self._called[request.cookies["session"]], "is_right": is_right}
        return web.json_response(body | {"reward": float(is_right)} | figures | self.verdict)


async def _posted(http: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with http.post(url, json=body) as response:
        if not response.ok:
            raise web.HTTPInternalServerError(text=f"ClientResponseError({response.status}, url={url!r})")
        return await response.json()


@contextmanager
def serving(gym: Gym) -> Iterator[str]:
    """The address of the servers."""
    loop, runner = asyncio.new_event_loop(), web.AppRunner(gym.application(), handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        gym.url = asyncio.run_coroutine_threadsafe(start(), loop).result(120)
        yield gym.url
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(300)
        loop.close()
