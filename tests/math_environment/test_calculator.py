"""The calculator: a call, its result, an answer; and calls that are none, which the policy reads about."""

import asyncio

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ConfigError, EnvironmentContext, FinishReason, ModelSpec, ToolCall, Turn
from rlcore_math.calculator import CalculatorEnvironment
from rlcore_math.checks import check_calculator
from rlcore_math.config import CalculatorConfig
from rlcore_rollout.environment_results import check_reset, check_step

CONFIG = CalculatorConfig(operations=("*",), num_train=10, num_evaluation=5, call_reward=0.25)
ROW = {"prompt": "12*12=", "answer": "144"}


def made(config=CONFIG):
    return CalculatorEnvironment(EnvironmentContext(seed=0), config)


def call(expression="12*12", name="calculator", error=None, **arguments):
    arguments = {} if error else {"expression": expression, **arguments}
    return ToolCall(id="call_0", name=name, arguments=arguments, text="…", error=error)


def turn(*calls, content="", **options):
    tokens, reason = np.zeros(1, np.int32), FinishReason.STOP
    return Turn(text="…", tokens=tokens, finish_reason=reason, content=content, tool_calls=calls, **options)


def play(*turns, environment=None):
    """The results of turns, up to the end of the episode."""
    environment = environment or made()
    reset = check_reset(asyncio.run(environment.reset(ROW, 0)), None)
    state, results = reset.state, []
    for said in turns:
        results.append(check_step(asyncio.run(environment.step(state, said)), None))
        state = results[-1].state
    return results


def test_the_prompt_is_the_problem_and_the_tool():
    reset = asyncio.run(made(evolve(CONFIG, system_prompt="Be brief.")).reset(ROW, 0))
    assert [dict(message) for message in reset.observation.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "12*12="},
    ]
    assert [tool["function"]["name"] for tool in reset.observation.tools] == ["calculator"]


def test_a_call_and_the_right_answer_earn_1_in_two_turns():
    first, last = play(turn(call()), turn(content="It is.</think> 144 ", begins_in_thought=True))
    (message,) = first.observation.messages
    assert message == {"role": "tool", "name": "calculator", "tool_call_id": "call_0", "content": "144"}
    assert (first.reward, first.done, last.reward, last.done, last.success) == (0.25, False, 0.75, True, True)
    assert (first.reward_components, last.reward_components) == ({"call": 0.25}, {"answer": 0.75})


@pytest.mark.parametrize(
    "turns",
    [
        [turn(content="144")],
        [turn(call()), turn(content="143")],
        [turn(call()), turn(content="144", begins_in_thought=True)],
        [turn(call(error="found no name")), turn(content="144")],
        [turn(call("oops")), turn(content="144")],
        [turn(call(name="oven")), turn(content="144")],
    ],
    ids=["no call", "wrong answer", "in a thought", "malformed", "no expression", "another tool"],
)
def test_nothing_else_is_solved(turns):
    last = play(*turns)[-1]
    assert (last.reward, last.done, last.success) == (0.0, True, False)


def test_what_is_wrong_with_a_call_is_what_the_policy_reads():
    results = play(turn(call(error="found no name"), call(name="oven"), call(7), call("1/0"), call("2+2")))
    contents = [message["content"] for message in results[0].observation.messages]
    assert contents[:1] == ["error: found no name"]
    assert all(content.startswith("error: ") for content in contents[:4])
    assert contents[4] == "4"
    assert results[0].metrics == {"readable_calls": 0.8}


def test_a_call_is_rewarded_once():
    assert [result.reward for result in play(turn(call()), turn(call()), turn(content="144"))] == [0.25, 0.0, 0.75]


def test_a_recipe_has_to_leave_a_turn_for_the_answer():
    context = CheckContext(model=ModelSpec(path="model"), device="cpu", world_size=1, max_sequence_length=99)
    assert [problem.path for problem in check_calculator(context, CONFIG)] == ["rollout.max_turns"]
    assert not check_calculator(evolve(context, max_turns=2), CONFIG)
    with pytest.raises(ConfigError) as raised:
        made(evolve(CONFIG, max_operand=-1, min_operand=3))
    assert [problem.path for problem in raised.value.problems] == ["environment.calculator.max_operand"]
