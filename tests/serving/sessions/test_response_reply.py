"""Replies of the Responses API, as OpenAI's own client reads them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Session, Sessions

from .chat_model import END, ChatMl, Script, served

TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}]
DELTAS = ("output_text", "function_call_arguments")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Endpoint:
    """A server, a session on it, and a client of that."""

    def __init__(self, script: Script, sessions: Sessions, address: str) -> None:
        self.script, self._sessions = script, sessions
        self._session: Session = sessions.open()
        url = f"{address}/{self._session.token}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)

    def create(self, **options: Any) -> Response:
        return self.client.responses.create(model="policy", **options)

    def recorded(self) -> list[str]:
        """The tokens in the loss of each of the session's segments; the session ends."""
        segments = self._sessions.finish(self._session)
        return [ChatMl().show(segment.tokens[segment.loss_mask].tolist()) for segment in segments]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    script, sessions = Script(), Sessions()
    with serving(served(script), sessions) as address:
        yield Endpoint(script, sessions, address)


def test_an_answer_is_a_message(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"hello{END}"]
    reply = endpoint.create(input="hi", instructions="be kind", metadata={"a": "b"}, temperature=0.5)
    Response.model_validate(reply.model_dump())
    assert (reply.output_text, reply.status, reply.incomplete_details, reply.model) == ("hello", "completed", None, "policy")
    assert (reply.instructions, reply.metadata, reply.temperature) == ("be kind", {"a": "b"}, 0.5)
    read = ChatMl().encode(ChatMl().render_chat([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]))
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (len(read), 6, len(read) + 6)


def test_an_answer_that_is_cut_is_incomplete(endpoint: Endpoint) -> None:
    endpoint.script.texts = ["hel"]
    reply = endpoint.create(input="hi", max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason, reply.output[0].status) == (
        "incomplete",
        "max_output_tokens",
        "incomplete",
    )
    assert endpoint.script.requests[0].max_tokens == 3


def test_items_that_come_back_continue_the_conversation(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"let me see {CALL}{CALL}{END}", f"{CALL}{END}", f"it is 1{END}"]
    items: list[Any] = [{"role": "user", "content": "one?"}]
    for number in range(3):
        reply = endpoint.create(input=items, tools=TOOLS)
        Response.model_validate(reply.model_dump())
        items += [item.model_dump(exclude_unset=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"a": 1}] * (2 - number)
        assert len({call.call_id for call in calls}) == len(calls)
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in calls]
    assert [item.get("type", "question") for item in items][:4] == ["question", "message", "function_call", "function_call"]
    assert reply.output_text == "it is 1"
    assert endpoint.recorded() == [f"let me see {CALL}{CALL}{END}{CALL}{END}it is 1{END}"]


def test_calls_alone_behind_an_assistants_message_of_the_prompt_are_an_answer_of_their_own(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"{CALL}{CALL}{END}", f"it is 1{END}"]
    items: list[Any] = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "let me see"}]
    reply = endpoint.create(input=items, tools=TOOLS)
    items += [{name: value for name, value in item.model_dump().items() if name != "id"} for item in reply.output]
    items += [{"type": "function_call_output", "call_id": item.call_id, "output": "1"} for item in reply.output]
    endpoint.create(input=items, tools=TOOLS)
    assert endpoint.recorded() == [f"{CALL}{CALL}{END}it is 1{END}"]


def test_chat_and_responses_are_one_conversation(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"a{END}", f"b{END}"]
    question: Any = {"role": "user", "content": "?"}
    first = endpoint.client.chat.completions.create(model="policy", messages=[question])
    endpoint.create(input=[question, {"role": "assistant", "content": first.choices[0].message.content}, question])
    assert endpoint.recorded() == [f"a{END}b{END}"]


def test_log_probabilities_are_included_where_they_are_asked_for(endpoint: Endpoint) -> None:
    endpoint.script.texts = ["ab", "ab"]
    part = endpoint.create(input="hi", include=["message.output_text.logprobs"]).output[0].content[0]
    assert [(one.token, one.logprob) for one in part.logprobs] == [("a", -0.125), ("b", -0.25)]
    assert endpoint.create(input="hi").output[0].content[0].logprobs is None


def test_clients_that_nothing_is_recorded_of_are_answered_too() -> None:
    script = Script(f"a{END}")
    with serving(served(script), Sessions(Session(token="key", record=None))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="key")
        assert client.responses.create(model="policy", input="hi").output_text == "a"


def test_a_stream_says_the_same_as_a_whole_answer(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"let me see {CALL}{CALL}{END}", f"{CALL}{END}", f"é{END}", "cut"]
    options: dict[str, Any] = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "max_output_tokens": 200}
    for status in (*["completed"] * 3, "incomplete"):
        with endpoint.client.responses.stream(model="policy", input="hi", **options) as stream:
            events = list(stream)
        said = events[-1].response
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type, said.status) == ("response.created", f"response.{status}", status)
        deltas = {kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta") for kind in DELTAS}
        calls = [item.arguments for item in said.output if item.type == "function_call"]
        assert deltas == dict(zip(DELTAS, (said.output_text, "".join(calls)), strict=True))
        done = [event.item.id for event in events if event.type == "response.output_item.done"]
        assert done == [item.id for item in said.output]
    assert len(endpoint.recorded()) == 4


def test_errors_are_those_of_chats(endpoint: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id: found") as refused:
        endpoint.create(input="hi", previous_response_id="resp_1", background=True)
    assert "background" in str(refused.value)
    with pytest.raises(openai.NotFoundError, match="this server has 'policy'"):
        endpoint.client.responses.create(model="gpt", input="hi")
    with pytest.raises(openai.BadRequestError) as long:
        endpoint.create(input="x" * 3000)
    assert long.value.code == "context_length_exceeded"
    assert endpoint.recorded() == []
