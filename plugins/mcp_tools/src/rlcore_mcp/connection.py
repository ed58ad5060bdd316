"""A connection to one MCP server: its start, its calls, and its end."""

import asyncio
import os
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import httpx2
from attrs import frozen
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

from rlcore.secrets import child_environment, keep_secret
from rlcore.spi import RewardError, Tool, fails_as
from rlcore_mcp.config import McpServerConfig
from rlcore_mcp.results import text_of, tool_of

CLOSE_S = 10.0
"""Most seconds for a server to end."""
_LAST_S = 1.0
"""Most seconds for the last lines of a program that ended."""
_KEPT_BYTES = 2000
Answer = TypeVar("Answer")


@frozen(kw_only=True)
class ToolResult:
    """The result of a call, as the policy reads it."""

    text: str
    is_error: bool


class _Tail(asyncio.Protocol):
    """The last bytes that a pipe brought."""

    def __init__(self) -> None:
        self.kept = b""
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.kept = (self.kept + data)[-_KEPT_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.ended.set()


class Connection:
    """A connection to a server. A task of the event loop holds it, since its context has to end in the task that began it."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self.tools: tuple[Tool, ...] = ()
        """The tools that the policy gets; set by `open`."""
        self._name, self._config = name, config
        self._connected: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._tail: _Tail | None = None
        self._holder = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, name: str, config: McpServerConfig) -> "Connection":
        """Connect to a server and list its tools. RewardError of the kind "tool" where that fails."""
        connection = cls(name, config)
        try:
            tools = await connection._within(connection._list(), config.start_timeout_s, "start_timeout_s", "did not start")
            connection.tools = connection._chosen(tools)
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        """Return whether it takes calls."""
        return not self._closing.is_set() and not self._holder.done()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. RewardError of the kind "tool" where the server ends, gives no answer, or breaks the protocol."""
        client = await self._connected
        work, doing = client.call_tool(tool, dict(arguments)), f"did not answer a call of {tool!r}"
        try:
            result = await self._within(work, self._config.call_timeout_s, "call_timeout_s", doing)
        except MCPError as error:  # the protocol's own error for arguments that do not fit
            return ToolResult(text=f"error: {error.message}", is_error=True)
        return ToolResult(text=text_of(result), is_error=bool(result.is_error))

    async def close(self) -> None:
        """End the connection, and the program if there is one."""
        self._closing.set()
        if not self._connected.done():
            self._holder.cancel()
        await asyncio.wait({self._holder}, timeout=CLOSE_S)

    async def _hold(self) -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(await self._transport(stack), cache=None))
            self._connected.set_result(client)
            await self._closing.wait()

    async def _transport(self, stack: AsyncExitStack) -> Any:
        config = self._config
        if config.url is not None:
            key = None if config.api_key_env is None else keep_secret(os.environ.get(config.api_key_env, ""))
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            timeout = httpx2.Timeout(config.start_timeout_s, read=None)  # a late read would end the connection of all calls
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
            return streamable_http_client(config.url, http_client=http)
        read, write = os.pipe()
        pipe, log = os.fdopen(read, "rb"), stack.enter_context(os.fdopen(write, "w"))
        transport, self._tail = await asyncio.get_running_loop().connect_read_pipe(_Tail, pipe)
        stack.callback(transport.close)
        program, *arguments = config.command
        parameters = StdioServerParameters(
            command=program, args=arguments, env=child_environment(config.pass_environment), encoding_error_handler="replace"
        )
        return stdio_client(parameters, errlog=log)

    async def _list(self) -> list[Tool]:
        client = await asyncio.shield(self._connected)
        tools: list[Tool] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += map(tool_of, page.tools)
            cursor = page.next_cursor
            if cursor is None:
                return tools

    def _chosen(self, tools: list[Tool]) -> tuple[Tool, ...]:
        listed, named = [tool["function"]["name"] for tool in tools], self._config.tools
        if missing := [name for name in named if name not in listed]:
            found, path = ", ".join(map(repr, missing)), f"environment.mcp.servers.{self._name}.tools"
            raise self._failure(f"has no tool {found} ({path}); it has {', '.join(map(repr, listed)) or 'none'}")
        return tuple(tool for tool, name in zip(tools, listed, strict=True) if not named or name in named)

    async def _within(self, work: Coroutine[Any, Any, Answer], timeout_s: float, key: str, doing: str) -> Answer:
        """The result of a request. MCPError where the server refuses its arguments, RewardError where it fails otherwise."""
        request = asyncio.ensure_future(work)
        try:
            await asyncio.wait({request, self._holder}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not request.done() and not self._holder.done():
                path = f"environment.mcp.servers.{self._name}.{key}"
                raise self._failure(f"{doing} within {timeout_s:g} s ({path})")
            error = request.exception() if request.done() and not request.cancelled() else None
            if request.done() and not request.cancelled() and error is None:
                return request.result()
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise error
            raise await self._broken(doing, error)
        finally:
            request.cancel()

    async def _broken(self, doing: str, error: BaseException | None) -> RewardError:
        """The failure of a request, by the error of the request or by the end of the connection."""
        is_lost = error is None or (isinstance(error, MCPError) and error.code == CONNECTION_CLOSED)
        if is_lost:
            self._closing.set()
            await asyncio.wait({self._holder}, timeout=CLOSE_S)
            ended = None if self._holder.cancelled() or not self._holder.done() else self._holder.exception()
            error = _leaf(ended) or error
        cause = f": {error}" if isinstance(error, MCPError) else "" if error is None else f": {type(error).__name__}: {error}"
        return self._failure(f"{doing}{cause}{await self._last_lines() if is_lost else ''}", error)

    async def _last_lines(self) -> str:
        if self._tail is None:
            return ""
        await asyncio.wait({asyncio.ensure_future(self._tail.ended.wait())}, timeout=_LAST_S)
        lines = self._tail.kept.decode(errors="replace").strip().splitlines()[-3:]
        return f"; it last wrote: {' | '.join(lines)}" if lines else ""

    def _failure(self, what: str, cause: BaseException | None = None) -> RewardError:
        """The error of an episode; the command is last, since tables cut long reasons."""
        server = self._config.url or " ".join(self._config.command)
        try:
            with fails_as("tool"):
                raise RewardError(f"the MCP server {self._name!r} {what} (the server is {server})") from cause
        except RewardError as error:
            return error


def _leaf(error: BaseException | None) -> BaseException | None:
    """The first error in groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
