"""An MCP server with one tool, which multiplies. It speaks over standard input and output."""

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def calculator(expression: str) -> str:
    """Works out a product, such as 4*7."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


server.run()
