"""Requests to prompts, samples to answers, and what a session records: no token is ever made twice."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rlcore.spi import FinishReason, SamplingParams
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.interface import Segment
from rlcore_serve.sessions.requests import AnswerRequest, read_request
from rlcore_serve.sessions.served_model import Answered, ServedModel, assistant_message
from rlcore_serve.sessions.session import Session, Sessions

from .chat_model import DEFAULT_SYSTEM, END, END_ID, START, ChatMl, Script, assistant, served, user

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
HEAD = f"{DEFAULT_SYSTEM}{START}user\none?{END}\n{START}assistant\n"


def answered(model: ServedModel, session: Session, request: AnswerRequest) -> Answered:
    return asyncio.run(model.answer(session, model.prepare(session, request)))


def chat(model: ServedModel, session: Session, *messages: dict[str, Any], **options: Any) -> Answered:
    body = {"model": "policy", "messages": list(messages), **options}
    default = session.sampling or model.sampling
    return answered(model, session, read_request(body, default, is_chat=True))


def complete(model: ServedModel, session: Session, prompt: str | list[int], **options: Any) -> Answered:
    body = {"model": "policy", "prompt": prompt, **options}
    return answered(model, session, read_request(body, model.sampling, is_chat=False))


def shown(segment: Segment) -> str:
    return ChatMl().show(segment.tokens.tolist())


def learnt(segment: Segment) -> str:
    """The tokens in the loss."""
    return ChatMl().show(segment.tokens[segment.loss_mask].tolist())


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


def test_an_answer_that_is_not_to_be_recorded_is_no_part_of_a_sequence(sessions: Sessions) -> None:
    script, session = Script(f"a{END}", f"b{END}", f"c{END}"), sessions.open()
    model = served(script)
    chat(model, session, user("one?"))
    assert chat(model, session, user("two?"), record=False).choices[0].content == "b"
    assert chat(model, session, user("two?"), assistant("b"), user("three?"), record=False).choices[0].content == "c"
    (segment,) = sessions.finish(session)
    assert shown(segment) == f"{HEAD}a{END}"
    assert script.requests[1].seed != script.requests[0].seed


def test_a_chat_goes_on_with_the_tokens_that_were_sampled(sessions: Sessions) -> None:
    script, session = Script(f"a  b{END}", f"c{END}"), sessions.open()
    model = served(script)
    first = chat(model, session, user("one?"))
    assert first.choices[0].content == "a  b"
    assert first.prompt.tolist() == script.tokenizer.encode(HEAD)
    chat(model, session, user("one?"), assistant("a  b"), user("two?"))
    (segment,) = sessions.finish(session)
    assert shown(segment) == f"{HEAD}a  b{END}\n{START}user\ntwo?{END}\n{START}assistant\nc{END}"
    assert learnt(segment) == f"a  b{END}c{END}"
    np.testing.assert_array_equal(script.requests[1].prompt, segment.tokens[: len(script.requests[1].prompt)])
    np.testing.assert_array_equal(
        segment.logprobs[segment.loss_mask], np.float32([-0.125, -0.25, -0.375, -0.5, -0.625, -0.125, -0.25])
    )
    assert not segment.logprobs[~segment.loss_mask].any()
    assert set(segment.weight_versions[~segment.loss_mask].tolist()) == {-1}
    assert set(segment.weight_versions[segment.loss_mask].tolist()) == {0}
    assert (segment.finish_reason, segment.text) == (FinishReason.STOP, "a  bc")


def test_an_answer_that_ended_by_length_gets_its_end_outside_the_loss(sessions: Sessions) -> None:
    script, session = Script("cut", f"c{END}"), sessions.open()
    model = served(script)
    chat(model, session, user("one?"))
    chat(model, session, user("one?"), assistant("cut"), user("two?"))
    (segment,) = sessions.finish(session)
    assert shown(segment) == f"{HEAD}cut{END}\n{START}user\ntwo?{END}\n{START}assistant\nc{END}"
    assert learnt(segment) == f"cutc{END}"


def test_versions_change_within_a_chat(sessions: Sessions) -> None:
    script, session = Script(f"a{END}", f"b{END}"), sessions.open()
    model = served(script)
    chat(model, session, user("one?"))
    script.version = 3
    chat(model, session, user("one?"), assistant("a"), user("two?"))
    (segment,) = sessions.finish(session)
    assert segment.weight_versions[segment.loss_mask].tolist() == [0, 0, 3, 3]


def test_a_branch_is_a_segment_of_its_own_and_counts_what_is_shared_once(sessions: Sessions) -> None:
    script, session = Script(f"a{END}", f"b{END}", f"c{END}"), sessions.open()
    model = served(script)
    chat(model, session, user("one?"))
    for question in ("two?", "three?"):
        chat(model, session, user("one?"), assistant("a"), user(question))
    first, second = sessions.finish(session)
    assert (learnt(first), learnt(second)) == (f"a{END}b{END}", f"c{END}")
    shared = len(script.tokenizer.encode(HEAD)) + 2
    np.testing.assert_array_equal(first.tokens[:shared], second.tokens[:shared])
    assert second.logprobs[shared - 1] != 0  # known all the same


def test_samples_say_which_session_they_belong_to(sessions: Sessions) -> None:
    script = Script(*["a" + END] * 5)
    model, both = served(script), [sessions.open(), sessions.open()]
    for session in (*both, *both, Session(token="", record=None)):
        chat(model, session, user("one?"))
    first, second, *later, shared = [request.conversation for request in script.requests]
    assert ([first, second], shared) == (later, -1)
    assert first != second


def test_a_history_that_the_client_edited_begins_a_segment_of_prompt(sessions: Sessions) -> None:
    script, session = Script(f"a{END}", f"b{END}"), sessions.open()
    model = served(script)
    chat(model, session, user("one?"))
    chat(model, session, user("one?"), assistant("A"), user("two?"))
    first, second = sessions.finish(session)
    assert (learnt(first), learnt(second)) == (f"a{END}", f"b{END}")
    assert shown(second) == f"{HEAD}A{END}\n{START}user\ntwo?{END}\n{START}assistant\nb{END}"


def test_a_history_that_was_never_generated_is_prompt(sessions: Sessions) -> None:
    script, session = Script(f"b{END}"), sessions.open()
    chat(served(script), session, user("one?"), assistant("mine"), user("two?"))
    (segment,) = sessions.finish(session)
    assert learnt(segment) == f"b{END}"


def test_several_answers_are_as_many_segments(sessions: Sessions) -> None:
    script, session = Script(f"a{END}", f"b{END}"), sessions.open(seed=(7,))
    answered = chat(served(script), session, user("one?"), n=2)
    assert [choice.content for choice in answered.choices] == ["a", "b"]
    assert len({request.seed for request in script.requests}) == 2
    assert [learnt(segment) for segment in sessions.finish(session)] == [f"a{END}", f"b{END}"]


@pytest.mark.parametrize(
    ("said", "reasoning", "content", "calls"),
    [("Hm. {call}", "Hm. {call}", "", 0), ("Hm.</think>{call}", "Hm.", "", 1), ("{call}</think>No.", "{call}", "No.", 0)],
)
def test_a_call_in_a_thought_that_the_prompt_begins_is_none(
    sessions: Sessions, said: str, reasoning: str, content: str, calls: int
) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    model = served(Script(said.format(call=call)), tokenizer=ChatMl(opens="<think>\n"))
    (choice,) = chat(model, sessions.open(), user("1+2?"), tools=TOOLS).choices
    assert (choice.reasoning, choice.content, len(choice.tool_calls)) == (reasoning.format(call=call), content, calls)


def test_a_thought_is_a_field_of_its_own_and_may_be_left_out_of_the_history(sessions: Sessions) -> None:
    script = Script(f"<think>\nHm.\n</think>\n\nThree.{END}", f"Four.{END}", f"Five.{END}")
    model, session, said = served(script), sessions.open(), {"role": "assistant", "content": "Three."}
    (choice,) = chat(model, session, user("1+2?")).choices
    assert (choice.reasoning, choice.content) == ("Hm.", "Three.")
    chat(model, session, user("1+2?"), said, user("2+2?"))
    chat(model, session, user("1+2?"), {**said, "reasoning_content": "Hm."}, user("2+3?"))
    texts = [ChatMl().show(request.prompt.tolist()) for request in script.requests[1:]]
    assert all("<think>\nHm.\n</think>\n\nThree." in text for text in texts)  # as it was sampled


def test_tool_calls_are_read_and_the_chat_goes_on_behind_them(sessions: Sessions) -> None:
    said = 'Well.<tool_call>{"arguments": {"b": 2,  "a": 1}, "name": "add"}</tool_call>'
    script, session = Script(f"{said}{END}", f"3{END}"), sessions.open()
    model = served(script)
    (choice,) = chat(model, session, user("1+2?"), tools=TOOLS).choices
    assert choice.content == "Well."
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [("add", {"a": 1, "b": 2})]
    call = {"id": "another", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
    history = [user("1+2?"), {"role": "assistant", "content": "Well.", "tool_calls": [call]}]
    chat(model, session, *history, {"role": "tool", "tool_call_id": "another", "content": "3"}, tools=TOOLS)
    (segment,) = sessions.finish(session)
    assert f"assistant\n{said}{END}\n{START}tool\n3{END}\n{START}assistant\n3{END}" in shown(segment)
    assert learnt(segment) == f"{said}{END}3{END}"


def test_other_tools_are_another_conversation(sessions: Sessions) -> None:
    session = sessions.open()
    model = served(Script(f"a{END}", f"b{END}"))
    chat(model, session, user("one?"), tools=TOOLS)
    chat(model, session, user("one?"), assistant("a"), user("two?"))
    assert len(sessions.finish(session)) == 2


def test_variables_of_the_template_make_the_prompt_and_another_conversation(sessions: Sessions) -> None:
    session, script = sessions.open(), Script(f"a{END}", f"b{END}", f"c{END}")
    model, quick = served(script), {"chat_template_kwargs": {"opens": "<think></think>"}}
    chat(model, session, user("one?"), **quick)
    chat(model, session, user("one?"), assistant("a"), user("two?"), **quick)
    chat(model, session, user("one?"), assistant("a"), user("two?"))
    first, second = sessions.finish(session)
    assert shown(first).count("assistant\n<think></think>") == 2
    assert learnt(first) == f"a{END}b{END}"
    assert "<think>" not in shown(second)
    with pytest.raises(RequestError) as caught:
        chat(model, sessions.open(), user("one?"), chat_template_kwargs={"shouts": True})
    assert caught.value.status == 400


def test_a_chat_that_begins_with_the_answer_to_a_text_is_none_of_it(sessions: Sessions) -> None:
    session = sessions.open()
    model = served(Script(f"a{END}", f"b{END}"))
    complete(model, session, "one")
    chat(model, session, assistant("a"), user("two?"))
    assert len(sessions.finish(session)) == 2


@pytest.mark.parametrize("history", ["refuse", "segment"])
def test_a_template_that_rewrites_answers_is_refused_or_begins_a_segment(sessions: Sessions, history: Any) -> None:
    script, session = Script(f"<think>x</think>a{END}", f"b{END}"), sessions.open()
    script.tokenizer = ChatMl(strips_thinking=True)
    model = served(script, history=history)
    content = chat(model, session, user("one?")).choices[0].content
    after = (user("one?"), assistant(content), user("two?"))
    if history == "refuse":
        with pytest.raises(RequestError, match="model.chat_template") as caught:
            chat(model, session, *after)
        assert caught.value.status == 400
        assert len(sessions.finish(session)) == 1  # what there was is not lost
        return
    chat(model, session, *after)
    first, second = sessions.finish(session)
    assert learnt(first) == f"<think>x</think>a{END}"
    assert shown(second) == f"{HEAD}a{END}\n{START}user\ntwo?{END}\n{START}assistant\nb{END}"
    assert learnt(second) == f"b{END}"


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (
            (user("one?"), assistant("a"), assistant("b"), user("two?")),
            "message 2, the assistant's, right behind another answer",
        ),
        ((user("one?"), {"role": "tool", "content": "3"}), "message 1, a tool's result, without a call before it"),
        (
            (user("one?"), assistant("a"), {"role": "tool", "content": "3"}),
            "message 2, a tool's result, behind the assistant's",
        ),
    ],
)
def test_a_history_that_contradicts_itself_is_refused(sessions: Sessions, messages: Any, found: str) -> None:
    session = sessions.open()
    with pytest.raises(RequestError) as caught:
        chat(served(Script(f"a{END}")), session, *messages)
    assert (caught.value.status, str(caught.value).startswith(f"messages: found {found}")) == (400, True)
    assert caught.value.body()["error"]["param"] == "messages"
    assert sessions.finish(session) == []


def test_a_session_that_records_nothing_refuses_lone_results_and_takes_answers_in_a_row() -> None:
    session, model = Session(token="t", record=None), served(Script(f"a{END}"))
    with pytest.raises(RequestError) as caught:
        chat(model, session, user("one?"), {"role": "tool", "tool_call_id": "t", "content": "3"})
    assert caught.value.body()["error"]["param"] == "messages"
    assert chat(model, session, user("one?"), assistant("a"), assistant("b"), user("two?")).choices[0].content == "a"


def test_a_turn_costs_no_more_the_longer_its_conversation_is(sessions: Sessions) -> None:
    """The whole is rendered at turns 1, 2, 4 and so on alone."""
    script, session = Script(*["a" + END] * 40), sessions.open()
    model, messages, rendered = served(script), [user("0")], [0]
    for turn in range(40):
        chat(model, session, *messages)
        rendered.append(script.tokenizer.num_messages)
        messages += [assistant("a"), user(str(turn))]
    costs = np.diff(rendered)
    assert costs[3] == costs[39] < costs[32]


@pytest.mark.parametrize("inside", ["", "{", "[]", '{"name": 3}', '{"name": "f", "arguments": "x"}'])
def test_what_is_no_call_stays_text(sessions: Sessions, inside: str) -> None:
    said = f"a <tool_call>{inside}</tool_call>"
    (choice,) = chat(served(Script(f"{said}{END}")), sessions.open(), user("one?"), tools=TOOLS).choices
    assert (choice.content, choice.tool_calls) == (said, ())


def test_tools_are_refused_where_nothing_reads_their_calls(sessions: Sessions) -> None:
    with pytest.raises(RequestError, match="tools: found some") as caught:
        chat(served(Script(), parse=None), sessions.open(), user("one?"), tools=TOOLS)
    assert caught.value.status == 400


def test_completions_continue_by_text_and_by_tokens(sessions: Sessions) -> None:
    script, session = Script("cd", "gh"), sessions.open()
    model = served(script)
    assert complete(model, session, "ab").choices[0].content == "cd"
    complete(model, session, "abcdef")
    (segment,) = sessions.finish(session)
    assert (shown(segment), learnt(segment)) == ("abcdefgh", "cdgh")
    other = sessions.open()
    tokens = script.tokenizer.encode("ab")
    script.texts += ["cd", "gh"]
    complete(model, other, tokens)
    complete(model, other, script.tokenizer.encode("abcdef"))
    (segment,) = sessions.finish(other)
    assert (shown(segment), learnt(segment)) == ("abcdefgh", "cdgh")


def test_a_text_goes_on_without_the_stop_token_that_its_client_has_not_seen(sessions: Sessions) -> None:
    script, session = Script(f"cd{END}", "gh"), sessions.open()
    model = served(script)
    complete(model, session, "ab")
    complete(model, session, "abcdef")
    first, second = sessions.finish(session)
    assert (shown(first), learnt(first)) == (f"abcd{END}", f"cd{END}")
    assert (shown(second), learnt(second)) == ("abcdefgh", "gh")


def test_tokens_that_the_model_has_not_are_refused(sessions: Sessions) -> None:
    """The generator would end with all that it is asked for."""
    with pytest.raises(RequestError, match="token 70;.*below 70") as caught:
        complete(served(Script("a"), vocab_size=70), sessions.open(), [1, 70])
    assert caught.value.status == 400


def test_stop_strings_end_what_the_client_reads_and_no_token(sessions: Sessions) -> None:
    session = sessions.open()
    answered = complete(served(Script("one.two")), session, "ab", stop="two")
    assert answered.choices[0].content == "one."
    assert learnt(sessions.finish(session)[0]) == "one.two"


def test_limits_and_seeds_are_the_sessions(sessions: Sessions) -> None:
    script = Script(*["a"] * 8)
    model = served(script, max_sequence_length=20)
    session, same = (sessions.open(seed=(3, 1), max_tokens=5) for _ in range(2))
    for one in (session, same):
        complete(model, one, "ab", max_tokens=9)
        complete(model, one, "ab", seed=4)
        complete(model, one, "ab", seed=4)
    assert [request.max_tokens for request in script.requests[:3]] == [5, 5, 5]
    seeds = [request.seed for request in script.requests]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] != seeds[1] == seeds[2]
    complete(model, sessions.open(), "ab" * 8, max_tokens=9)
    assert script.requests[-1].max_tokens == 4
    with pytest.raises(RequestError) as caught:
        complete(model, session, "ab" * 10)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("options", "names"),
    [({"temperature": 0.5}, "temperature 0.5"), ({"top_p": 0.5}, "top_p 0.5"), ({"top_k": 3}, "top_k 3")],
)
def test_a_session_of_a_run_samples_as_the_recipe_says(sessions: Sessions, options: dict[str, float], names: str) -> None:
    session = sessions.open(sampling=SamplingParams(stop_token_ids=(END_ID,)))
    script = Script("a")
    with pytest.raises(RequestError, match=names) as caught:
        chat(served(script), session, user("one?"), **options)
    assert caught.value.status == 400
    chat(served(script), session, user("one?"), temperature=1)
    assert script.requests[0].sampling.stop_token_ids == (END_ID,)


def test_what_the_generator_cannot_do_is_refused(sessions: Sessions) -> None:
    with pytest.raises(RequestError, match="stop_strings") as caught:
        complete(served(Script("a"), capabilities=frozenset()), sessions.open(), "ab", stop=["x"])
    assert caught.value.status == 400


def test_what_the_template_refuses_is_said(sessions: Sessions) -> None:
    with pytest.raises(RequestError, match="forbidden") as caught:
        chat(served(Script("a")), sessions.open(), {"role": "forbidden", "content": ""})
    assert caught.value.status == 400


def test_an_answer_for_a_session_that_ended_meanwhile_is_not_recorded(sessions: Sessions) -> None:
    script, session = Script("a"), sessions.open()

    class Ending(Script):
        async def sample(self, request: Any) -> Any:
            sessions.finish(session)
            return await script.sample(request)

    with pytest.raises(RequestError) as caught:
        complete(served(script, sampler=Ending()), session, "ab")
    assert caught.value.code == "session_finished"
    assert sessions.finish(session) == []


def test_what_has_no_effect_is_told_once(sessions: Sessions) -> None:
    told: list[str] = []
    model, session = served(Script(f"a{END}", f"b{END}", f"c{END}"), note=told.append), sessions.open()
    for value in (False, False, True):
        chat(model, session, user("one?"), tools=TOOLS, parallel_tool_calls=value)
    (note,) = told
    assert note.startswith("a request's parallel_tool_calls = false has no effect: ")


FORCED = '<tool_call>\n{"name": "add", "arguments":'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("opens", ["", "<think>\n"])
def test_a_forced_call_begins_the_answer_outside_the_loss(sessions: Sessions, choice: Any, opens: str) -> None:
    said = f' {{"a": 1}}}}\n</tool_call>{END}'
    script = Script(said, f"it is 1{END}")
    model, session = served(script, tokenizer=ChatMl(opens=opens)), sessions.open()
    (answer,) = chat(model, session, user("1+0?"), tools=TOOLS, tool_choice=choice).choices
    assert (answer.content, answer.reasoning, answer.tool_calls[0].arguments) == ("", "", {"a": 1})
    assert ChatMl().show(script.requests[0].prompt.tolist()).endswith(FORCED)
    called = assistant_message(answer)
    chat(model, session, user("1+0?"), called, {"role": "tool", "content": "1", "tool_call_id": ""}, tools=TOOLS)
    (segment,) = sessions.finish(session)
    assert learnt(segment) == f"{said}it is 1{END}"
    assert f"{FORCED}{said}" in ChatMl().show(segment.tokens.tolist())


def test_tools_are_in_the_text_where_the_template_reads_none(sessions: Sessions) -> None:
    told: list[str] = []
    said = f'<tool_call>{{"name": "add", "arguments": {{"a": 1}}}}</tool_call>{END}'
    script = Script(said, f"it is 1{END}")
    model, session = served(script, shows_tools=False, note=told.append), sessions.open()
    (answer,) = chat(model, session, user("1+0?"), tools=TOOLS).choices
    called = assistant_message(answer)
    chat(model, session, user("1+0?"), called, {"role": "tool", "content": "1", "tool_call_id": ""}, tools=TOOLS)
    first, second = (ChatMl().show(request.prompt.tolist()) for request in script.requests)
    assert "You may call tools." in first
    assert "tools: [" not in first  # as the template would show them
    assert second.startswith(f"{first}{said}")
    assert f"{START}user\n<tool_response>\n1\n</tool_response>" in second
    assert len(told) == 1
    (segment,) = sessions.finish(session)
    assert learnt(segment) == f"{said}it is 1{END}"


def test_a_call_is_not_forced_in_a_form_that_cannot_be_begun(sessions: Sessions) -> None:
    with pytest.raises(RequestError) as refused:
        chat(served(Script(), tool_form="openai"), sessions.open(), user("1+0?"), tools=TOOLS, tool_choice="required")
    assert str(refused.value).startswith("tool_choice: found one that forces a call")
