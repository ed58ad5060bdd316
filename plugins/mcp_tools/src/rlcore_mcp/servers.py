"""The servers of a recipe, on an event loop in a thread of its own.

Environments are called on several event loops in turn, and a connection belongs to one.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from threading import Lock, Thread
from typing import Any, TypeVar

from rlcore.spi import ConfigError, Problem, RewardError, Tool, fails_as
from rlcore_mcp.config import McpServerConfig
from rlcore_mcp.connection import CLOSE_S, Connection, ToolResult

Answer = TypeVar("Answer")


class Connections:
    """The connections of one event loop. A server that ended is started again by the next call."""

    def __init__(self, configs: Mapping[str, McpServerConfig]) -> None:
        self._configs = configs
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._open: dict[str, Connection] = {}

    async def tools(self) -> list[Tool]:
        """Return the tools of all servers. RewardError with every server that fails, ConfigError for names that collide."""
        await self._open_all()
        return [tool for connection in self._in_order().values() for tool in connection.tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. A name that no server lists is an error for the policy."""
        if len(self._open) < len(self._configs):
            await self._open_all()
        servers = _servers_of(self._in_order())
        if name not in servers:
            listed = ", ".join(map(repr, servers)) or "none"
            return ToolResult(text=f"error: there is no tool {name!r:.60}; the tools are {listed}", is_error=True)
        return await (await self._connection(servers[name][0])).call(name, arguments)

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*(connection.close() for connection in self._open.values()))

    def _in_order(self) -> Mapping[str, Connection]:
        """The connections in the recipe's order, whichever began first: so are the tools in the prompt."""
        return {name: self._open[name] for name in self._configs}

    async def _open_all(self) -> None:
        found = await asyncio.gather(*map(self._connection, self._configs), return_exceptions=True)
        failures = [one for one in found if isinstance(one, BaseException)]
        if len(failures) > 1 and all(isinstance(one, RewardError) for one in failures):
            with fails_as("tool"):
                raise RewardError("\n".join(map(str, failures)))
        if failures:
            raise failures[0]
        if problems := [_collision(name, owners) for name, owners in _servers_of(self._in_order()).items() if len(owners) > 1]:
            raise ConfigError(problems)

    async def _connection(self, name: str) -> Connection:
        async with self._locks[name]:
            connection = self._open.get(name)
            if connection is None or not connection.is_open:
                if connection is not None:
                    await connection.close()
                connection = self._open[name] = await Connection.open(name, self._configs[name])
            return connection


class McpServers:
    """The connections and the thread of their event loop, which the first call starts."""

    def __init__(self, configs: Mapping[str, McpServerConfig]) -> None:
        self._configs = configs
        self._lock = Lock()
        self._running: tuple[asyncio.AbstractEventLoop, Thread, Connections] | None = None

    async def tools(self) -> list[Tool]:
        """See Connections."""
        return await self._awaited(lambda connections: connections.tools())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """See Connections."""
        return await self._awaited(lambda connections: connections.call(name, arguments))

    def close(self) -> None:
        """End the connections and the thread; a later call starts others."""
        with self._lock:
            running, self._running = self._running, None
        if running is None:
            return
        loop, thread, connections = running
        try:
            asyncio.run_coroutine_threadsafe(connections.close(), loop).result(2 * CLOSE_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _awaited(self, work: Callable[[Connections], Coroutine[Any, Any, Answer]]) -> Answer:
        loop, connections = self._started()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(connections), loop))

    def _started(self) -> tuple[asyncio.AbstractEventLoop, Connections]:
        with self._lock:
            if self._running is None:
                loop = asyncio.new_event_loop()
                # A program that ends without `close` does not wait for it; the servers' input then ends.
                thread = Thread(target=loop.run_forever, name="rlcore-mcp", daemon=True)
                thread.start()
                self._running = (loop, thread, Connections(self._configs))
            loop, _, connections = self._running
        return loop, connections


def _servers_of(connections: Mapping[str, Connection]) -> dict[str, list[str]]:
    """The servers of each tool's name."""
    found: dict[str, list[str]] = {}
    for server, connection in connections.items():
        for tool in connection.tools:
            found.setdefault(tool["function"]["name"], []).append(server)
    return found


def _collision(name: str, servers: list[str]) -> Problem:
    return Problem(
        path="environment.mcp.servers",
        found=f"a tool {name!r} of each of {', '.join(servers)}",
        expected="each name of a tool once",
        remedy=f"Name the tools that the policy gets in environment.mcp.servers.{servers[0]}.tools.",
    )
