"""vLLM's parsers of tools' calls, by the names that `vllm serve --tool-call-parser` knows them by."""

from collections.abc import Sequence
from typing import Any

from rlcore.reading import parse_json
from rlcore.spi import ModelSpec, ParseToolCalls, Tool, ToolCall
from rlcore_vllm.engines import versions


def tool_parser(name: str, model: ModelSpec) -> ParseToolCalls | None:
    """Return vLLM's parser of this name for a tokenizer, or None. Most parsers return a call that they cannot read as text."""
    versions.import_without_torchao()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tokenizers import get_tokenizer
    from vllm.tool_parsers import ToolParserManager

    if name not in ToolParserManager.tool_parsers and name not in ToolParserManager.lazy_parsers:
        return None
    parser = ToolParserManager.get_tool_parser(name)
    tokenizer = get_tokenizer(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)

    def parse(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
        request = ChatCompletionRequest(messages=[], tools=[dict(tool) for tool in tools] or None)
        found = parser(tokenizer, request.tools).extract_tool_calls(text, request)  # one keeps the state of a text
        return found.content or "", [_call(number, call) for number, call in enumerate(found.tool_calls)]

    return parse


def _call(number: int, found: Any) -> ToolCall:
    """The call of which vLLM has found name and arguments."""
    name, text, error = found.function.name, found.function.arguments, None
    try:
        arguments = parse_json(text)
    except ValueError as raised:
        arguments, error = None, str(raised)
    if not isinstance(arguments, dict):
        error = error or f"found {type(arguments).__name__} as arguments; expected an object"
        arguments = {}
    return ToolCall(id=f"call_{number}", name=name, arguments=arguments, text=text, error=error)
