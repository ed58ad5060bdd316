"""Foreign clients run an episode each against a session, with a tool; each is one recorded sequence."""

from typing import Any

import pytest
from attrs import frozen

from rlcore.spi import capabilities
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Sessions

from ..sessions.chat_model import END, ChatMl, Script, served  # type: ignore[import-not-found]
from .environments import interpreter_with, run_program

CALL = f'<tool_call>{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}</tool_call>{END}'
SAID = (CALL, f"it is 3{END}")
FORCED = (
    f'add", "arguments": {{"a": 1, "b": 2}}}}</tool_call>{END}',
    f'final_answer", "arguments": {{"answer": "3"}}}}</tool_call>{END}',
)

OPENAI = """
import json, os, openai
client, model = openai.OpenAI(), os.environ["OPENAI_MODEL"]
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
messages = [{"role": "user", "content": "1+2?"}]
with client.chat.completions.stream(model=model, messages=messages, tools=tools) as stream:
    message = stream.get_final_completion().choices[0].message
call = message.tool_calls[0]
arguments = json.loads(call.function.arguments)
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}]
print(client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message.content)
"""
ANTHROPIC = """
import os, anthropic
client, model = anthropic.Anthropic(), os.environ["OPENAI_MODEL"]
schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"name": "add", "input_schema": schema}]
messages = [{"role": "user", "content": "1+2?"}]
with client.messages.stream(model=model, max_tokens=500, messages=messages, tools=tools) as stream:
    said = stream.get_final_message().content
result = {"type": "tool_result", "tool_use_id": said[0].id, "content": str(said[0].input["a"] + said[0].input["b"])}
messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
print(client.messages.create(model=model, max_tokens=500, messages=messages, tools=tools).content[0].text)
"""
LITELLM = """
import json, os, litellm
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]
options = {"model": "openai/" + os.environ["OPENAI_MODEL"], "api_base": os.environ["OPENAI_BASE_URL"], "tools": tools}
messages = [{"role": "user", "content": "1+2?"}]
chunks = list(litellm.completion(messages=messages, stream=True, **options))
message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
call = message.tool_calls[0]
arguments = json.loads(call.function.arguments)
messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}]
print(litellm.completion(messages=messages, **options).choices[0].message.content)
"""
OPENAI_AGENTS = """
import asyncio, os
from agents import Agent, OpenAI{api}Model, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

@function_tool
def add(a: int, b: int) -> int:
    return a + b

async def main():
    set_tracing_disabled(True)
    model = OpenAI{api}Model(model=os.environ["OPENAI_MODEL"], openai_client=AsyncOpenAI())
    result = Runner.run_streamed(Agent(name="adder", instructions="Add.", model=model, tools=[add]), "1+2?")
    async for event in result.stream_events():
        pass
    print(result.final_output)

asyncio.run(main())
"""
PYDANTIC_AI = """
import os
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), instructions="Add.")

@agent.tool_plain
def add(a: int, b: int) -> int:
    return a + b

print(agent.run_sync("1+2?").output)
"""
SMOLAGENTS = """
import os
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    '''Adds two numbers.

    Args:
        a: The first one.
        b: The second one.
    '''
    return a + b

model = OpenAIServerModel(
    model_id=os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
print("it is", ToolCallingAgent(tools=[add], model=model, verbosity_level=0).run("1+2?"))
"""
LANGCHAIN = """
import os
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

model = ChatOpenAI(model=os.environ["OPENAI_MODEL"]).bind_tools([add])
messages = [HumanMessage("1+2?")]
said = None
for chunk in model.stream(messages):
    said = chunk if said is None else said + chunk
messages += [said, add.invoke(said.tool_calls[0])]
print(model.invoke(messages).content)
"""


@frozen(kw_only=True)
class Client:
    """A client, the program that it runs, and what the model says to it."""

    requirement: str
    program: str
    said: tuple[str, ...] = SAID
    num_segments: int = 1


CLIENTS = {
    "openai": Client(requirement="openai>=2", program=OPENAI),
    "anthropic": Client(requirement="anthropic", program=ANTHROPIC),
    "litellm": Client(requirement="litellm", program=LITELLM),
    "openai-agents": Client(requirement="openai-agents", program=OPENAI_AGENTS.replace("{api}", "ChatCompletions")),
    "openai-agents-responses": Client(requirement="openai-agents", program=OPENAI_AGENTS.replace("{api}", "Responses")),
    "pydantic-ai": Client(requirement="pydantic-ai-slim[openai]", program=PYDANTIC_AI),
    "smolagents": Client(
        requirement="smolagents[openai]", program=SMOLAGENTS, said=FORCED, num_segments=2
    ),  # it rewrites its calls as text
    "langchain-openai": Client(requirement="langchain-openai", program=LANGCHAIN),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_runs_an_episode(name: str) -> None:
    client, notes = CLIENTS[name], list[str]()
    python = interpreter_with(client.requirement)
    script, sessions = Script(*client.said), Sessions()
    able = frozenset({capabilities.STOP_STRINGS, capabilities.TOP_P, capabilities.TOP_K})
    model: Any = served(script, capabilities=able, max_sequence_length=100_000, note=notes.append)
    with serving(model, sessions) as address:
        session = sessions.open()
        url, key = f"{address}/{session.token}", session.token
        variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}
        variables |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        assert "3" in run_program(python, client.program, **variables)
        segments = sessions.finish(session)
    assert not script.texts
    assert len(segments) == client.num_segments
    learnt = "".join(ChatMl().show(segment.tokens[segment.loss_mask].tolist()) for segment in segments)
    assert learnt == "".join(client.said)
