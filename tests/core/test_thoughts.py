"""Thoughts of every model family are stripped from a response."""

import time

import pytest

from rlcore.thoughts import MARK_TOKENS, opened_thought, without_thoughts

MARKS = [
    *(("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("<reasoning>", "</reasoning>")),
    *(("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("<Think>", "</THINK>")),
    *(("<|begin_of_thought|>", "<|end_of_thought|>"), ("<|START_THINKING|>", "<|END_THINKING|>")),
    *(("<mm:think>", "</mm:think>"), ("<longcat_think>", "</longcat_think>"), ("<think\n>", "</think >")),
    *(("<scratchpad>", "</scratchpad>"), ("<thoughts>", "</thoughts>"), ('<think type="a">', "</think>")),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    *(("<|channel>thought\n", "<channel|>"), ("<|inner_prefix|>", "<|inner_suffix|>")),
]


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_thoughts_of_all_forms_are_left_out(begin: str, end: str) -> None:
    assert without_thoughts(f"{begin}one{end}two") == "two"
    assert without_thoughts(f"{begin}one") == ""
    assert without_thoughts(f"one{end}two") == "two"


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_a_prompt_that_ends_in_a_mark_begins_a_thought(begin: str, end: str) -> None:
    for prompt in (begin, f"User: 2?\nAssistant: {begin}\n", f"{begin}one{end}two{begin}"):
        assert opened_thought(prompt) == begin.removesuffix("thought\n").rstrip("\n")
    for prompt in ("", "two", end, f"{begin}{end}\n\n", f"{begin}one", f"Think within {begin} and {end}"):
        assert opened_thought(prompt) == ""
    assert len(begin) < MARK_TOKENS


@pytest.mark.parametrize(
    ("response", "said", "thinking"),
    [
        ("", "", ""),
        ("two", "two", ""),
        ("two <think>one", "two ", ""),
        ("<think>one</think>two<think>three</think>four", "twofour", "twofour"),
        ("<think>one <think> more</think>two", "two", "two"),
        ("one</think>two</think>three", "three", "three"),
        ("one</think>two<think>three", "two", "two"),
        ("a < think > b", "a < think > b", ""),
        ("<thinker>a", "<thinker>a", ""),
        ("analysisWe add.assistantfinalTwo", "Two", "Two"),
        ("analysisWe add.assistantanalysisAgain.", "", ""),
        ("analysis$2$ or \\boxed{2}", "", ""),
        ("analysis of it: two", "analysis of it: two", ""),
    ],
)
def test_a_thought_goes_on_to_its_end_or_the_responses(response: str, said: str, thinking: str) -> None:
    assert without_thoughts(response) == said
    assert without_thoughts(response, is_thinking=True) == thinking


@pytest.mark.parametrize(
    "response",
    [
        "<think a=" + " " * 200_000,
        "<think" + " " * 200_000,
        "<think " + "a" * 200_000,
        "<think a=" * 30_000,
        "◁think a=" * 30_000,
        "<|channel|>" * 30_000,
        "assistant" * 30_000,
        "<think>" * 30_000,
        "</think>" * 30_000,
    ],
    ids=lambda response: response[:10],
)
def test_a_response_takes_time_in_proportion_to_its_length(response: str) -> None:
    """Where environments read it, on the loop of all episodes."""
    began = time.thread_time()
    without_thoughts(response)
    assert time.thread_time() - began < 1.0
