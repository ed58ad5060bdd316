"""Texts of what servers return, as the policy reads them."""

import json

from mcp.types import BlobResourceContents, CallToolResult, ContentBlock, EmbeddedResource, ResourceLink, TextContent
from mcp.types import Tool as McpTool

from rlcore.spi import Tool


def tool_of(tool: McpTool) -> Tool:
    """A server's tool as chat templates take it."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def text_of(result: CallToolResult) -> str:
    """The text of a result: its blocks, a line feed between two; its structured content as JSON where it has no block."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_text_of_block, result.content))


def _text_of_block(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ResourceLink):
        return str(block.uri)
    if isinstance(block, EmbeddedResource):
        resource = block.resource
        return f"[{resource.mime_type or 'data'}]" if isinstance(resource, BlobResourceContents) else resource.text
    return f"[{block.mime_type}]"
