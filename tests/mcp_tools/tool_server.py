"""A real MCP server, a program: its tools add, fail, hang, return an image, and end the server. With a port it speaks HTTP."""

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.types import ImageContent, TextContent

server = MCPServer("tools", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


@server.tool()
def fail() -> str:
    raise ValueError("no such page")


@server.tool()
async def hang() -> str:
    await asyncio.sleep(600)
    return "late"


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    return [TextContent(type="text", text="a dot"), ImageContent(type="image", data="AAAA", mime_type="image/png")]


@server.tool()
def variable(name: str) -> str:
    return os.environ.get(name, "unset")


@server.tool()
def die() -> str:
    print("the disk is full", file=sys.stderr, flush=True)
    os._exit(3)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
