"""Where answers are found in responses, and how they are asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_reasoning_gym.answers import answer_of, as_response, instruction_of
from rlcore_reasoning_gym.config import ReasoningGymConfig

TAG = ReasoningGymConfig()
LAST_LINE = ReasoningGymConfig(answer_from="last_line")
RESPONSE = ReasoningGymConfig(answer_from="response")
BEGUN = ReasoningGymConfig(thought_in_prompt=True)


@pytest.mark.parametrize(
    ("config", "response", "answer"),
    [
        (TAG, "so <answer>42</answer>", "42"),
        (TAG, "<answer> 1\n2 </answer> done", "1\n2"),
        (TAG, "<answer>1</answer>, no: <answer>2</answer>", "2"),
        (TAG, "within <answer> it goes: <answer>2</answer>", "2"),
        (TAG, "<answer>1</answer> and <answer>2", "1"),
        (TAG, "<think><answer>1</answer>", None),
        (TAG, "<think><answer>1</answer></think><answer>2</answer>", "2"),
        (BEGUN, "<answer>1</answer>", None),
        (BEGUN, "<answer>1</answer></think><answer>2</answer>", "2"),
        (RESPONSE, "<think>1</think> 2", "2"),
        (TAG, "42", None),
        (TAG, "<answer>42", None),
        (TAG, "42</answer>", None),
        (TAG, "</answer>42<answer>", None),
        (TAG, "<answer> </answer>", None),
        (ReasoningGymConfig(answer_tag="final"), "<answer>1</answer><final>2</final>", "2"),
        (LAST_LINE, "first 41\nthen\n 42 \n\n", "42"),
        (LAST_LINE, " \n", None),
        (RESPONSE, " 1 2\n3 4\n", "1 2\n3 4"),
        (RESPONSE, "", None),
    ],
)
def test_answers_of_responses(config, response, answer):
    assert answer_of(response, config) == answer


@pytest.mark.parametrize("config", [TAG, RESPONSE, ReasoningGymConfig(answer_tag="x_1")])
@settings(max_examples=30)
@given(answer=st.text().map(str.strip).filter(lambda text: text and "<" not in text))
def test_an_answer_put_into_a_response_is_found_there(config, answer):
    assert answer_of(as_response(answer, config), config) == answer


def test_the_instruction_says_where_the_answer_goes():
    assert "<answer>" in instruction_of(TAG)
    assert "<final>" in instruction_of(ReasoningGymConfig(answer_tag="final"))
    assert "last line" in instruction_of(LAST_LINE)
    assert "<" not in instruction_of(RESPONSE)
    assert instruction_of(ReasoningGymConfig(instruction="")) == ""
