"""The environment that a reward model scores: prompts, rewards and failures, in the process that it starts."""

import asyncio

import numpy as np
import pytest

from rlcore.spi import DataError, EnvironmentContext, FinishReason, PluginError, RewardError, Turn
from rlcore_reward_model.config import RewardModelConfig
from rlcore_reward_model.environment import RewardModelEnvironment, conversation_of, step_ends
from rlcore_reward_model.scorer import Conversation, Scoring, score


def turn(text):
    return Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)


def environment_of(path, **options):
    return RewardModelEnvironment(EnvironmentContext(seed=0), RewardModelConfig(path=str(path), **options))


async def rewarded(environment, prompt, *answers):
    state = (await environment.reset({"prompt": prompt}, 0)).state
    return await asyncio.gather(*(environment.step(state, turn(answer)) for answer in answers), return_exceptions=True)


def test_answers_have_the_rewards_that_the_model_gives(reward_model):
    environment = environment_of(reward_model, success_reward=-1000.0, prompt_format="chat", system_prompt="Be kind.")
    try:
        results = asyncio.run(rewarded(environment, "1+1=", "2", "3", "x" * 200))
    finally:
        environment.close()
    prompt = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+1="})
    scoring = Scoring(path=str(reward_model), device="cpu", dtype="float32")
    expected = score(scoring, [Conversation(prompt=prompt, answer=answer) for answer in "23"])
    assert [result.reward for result in results[:2]] == pytest.approx(expected, abs=1e-5)
    assert all(result.done and result.success for result in results[:2])
    assert isinstance(results[2], RewardError)


def test_a_model_that_is_not_there_ends_the_run(tmp_path):
    environment = environment_of(tmp_path / "nothing")
    try:
        (found,) = asyncio.run(rewarded(environment, "1+1=", "2"))
    finally:
        environment.close()
    assert isinstance(found, PluginError)


def test_tools_are_shown_and_an_answer_that_the_prompt_begins_is_scored_whole(tmp_path):
    tool = {"type": "function", "function": {"name": "f"}}
    user, begun = {"role": "user", "content": "q"}, {"role": "assistant", "content": "So "}
    shown = asyncio.run(environment_of(tmp_path).reset({"prompt": [user, begun], "tools": (tool,)}, 0)).state
    assert shown.tools == (tool,)
    assert conversation_of(shown, "4") == Conversation(prompt=[user], answer="So 4", tools=(tool,))
    with pytest.raises(DataError, match="tools"):
        asyncio.run(environment_of(tmp_path).reset({"prompt": "q", "tools": (tool,)}, 0))


def test_prompts_are_shown_as_the_section_says(tmp_path):
    shown = asyncio.run(environment_of(tmp_path).reset({"prompt": "hello"}, 0)).observation
    assert shown.text == "hello"
    chat = asyncio.run(environment_of(tmp_path, prompt_format="chat").reset({"prompt": "hello"}, 0)).observation
    assert chat.messages == [{"role": "user", "content": "hello"}]
    messages = [{"role": "user", "content": "hi"}]
    assert asyncio.run(environment_of(tmp_path).reset({"prompt": messages}, 0)).observation.messages == messages
    with pytest.raises(DataError, match="expected a prompt"):
        asyncio.run(environment_of(tmp_path).reset({"question": "hello"}, 0))


def test_steps_of_an_answer_have_the_values_of_its_beginnings(reward_model):
    environment = environment_of(reward_model, step_separator="\n", success_reward=-1000.0)
    answer = "1\n22\n\n3"
    try:
        (found,) = asyncio.run(rewarded(environment, "1+1=", answer))
    finally:
        environment.close()
    ends = (2, 5, 6, None)
    expected = score(Scoring(path=str(reward_model)), [Conversation(prompt="1+1=", answer=answer[:end]) for end in ends])
    assert [*found.part_rewards] == [2, 5, 6]
    assert [*found.part_rewards.values(), found.reward] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("answer", "separator", "ends"),
    [
        ("a\n\nb", "\n\n", [3]),
        ("a\n\nb\n\n", "\n\n", [3]),
        ("ab", "\n\n", []),
        ("a.b.", ".", [2]),
        ("a\nb", None, []),
        ("", "\n", []),
    ],
)
def test_a_step_ends_with_the_separator(answer, separator, ends):
    assert step_ends(answer, separator) == ends
