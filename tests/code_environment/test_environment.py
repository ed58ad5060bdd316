"""Prompts and rewards of the environment."""

import asyncio

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ConfigError, DataError, EnvironmentContext, FinishReason, Turn
from rlcore_code.environment import CodeEnvironment

from .sandboxes import CONFIG, needs_namespaces

ROW = {"prompt": "Write f(n), which is n.", "tests": ["assert f(1) == 1", "assert f(2) == 2"]}


@pytest.fixture(autouse=True, scope="module")
def _namespaces():
    needs_namespaces()


def environment(**options):
    return CodeEnvironment(EnvironmentContext(seed=0), evolve(CONFIG, **options))


def observation(row=ROW, **options):
    return asyncio.run(environment(**options).reset(row, 0)).observation


def step(response, *, begins_in_thought=False, **options):
    async def episode():
        played = environment(**options)
        turn = Turn(
            text=response, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP, begins_in_thought=begins_in_thought
        )
        return await played.step((await played.reset(ROW, 0)).state, turn)

    return asyncio.run(episode())


def test_prompts_are_instructions_as_messages_or_text():
    assert environment().rows("train") is None
    text = f"{ROW['prompt']}\n\nWrite a Python program, and put all of it into one code block at the end."
    assert observation().messages == [{"role": "user", "content": text}]
    assert observation(prompt_format="text", instruction="Q: {problem}").text == f"Q: {ROW['prompt']}"
    assert observation(system_prompt="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}
    own = [{"role": "user", "content": "f?"}]
    shown = observation({**ROW, "prompt": own, "tools": ({},)})
    assert (shown.messages, shown.tools) == (own, ({},))


@pytest.mark.parametrize(
    ("program", "credit", "reward"),
    [("def f(n): return n", 0.5, 1.0), ("def f(n): return 1", 0.5, 0.25), ("def f(n): return 1", 0.0, 0.0)],
)
def test_rewards(program, credit, reward):
    result = step(f"So:\n```python\n{program}\n```", partial_credit=credit)
    assert result.reward == reward
    assert result.success is (reward == 1.0)
    assert result.done
    assert result.metrics == {"answered": 1.0, "program_timed_out": 0.0, "answered_object": 0.0}


def test_a_response_without_a_block_is_no_answer():
    result = step("def f(n): return n", partial_credit=0.5)
    assert (result.reward, result.success, result.metrics) == (0.0, False, {"answered": 0.0})
    assert step("```\ndef f(n): return n\n```", thought_in_prompt=True).metrics == {"answered": 0.0}
    assert step("```\ndef f(n): return n\n```", begins_in_thought=True).metrics == {"answered": 0.0}


def test_what_is_wrong_is_told():
    with pytest.raises(ConfigError, match=r"environment\.code\.instruction"):
        environment(instruction="Write.")
    with pytest.raises(DataError, match="the fields 'tests'"):
        observation({"tests": ROW["tests"]})
    with pytest.raises(DataError, match="found only the fields 'prompt'"):
        observation({"prompt": "?"})
