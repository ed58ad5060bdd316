"""What an environment returns: what the interface allows passes, everything else is named."""

import numpy as np
import pytest

from rlcore.spi import ContractError, Observation, ResetResult, RewardError, StepResult
from rlcore_rollout.environment_results import check_reset, check_step


def going(**observation):
    return StepResult(reward=1.0, done=False, observation=Observation(**observation))


def done(reward, **options):
    return StepResult(reward=reward, done=True, **options)


OBSERVATIONS = [
    {"text": "1+1="},
    {"messages": [{"role": "user", "content": "1+1="}]},
    {"tokens": np.asarray([0, 101], np.int32)},
]


@pytest.mark.parametrize("given", OBSERVATIONS)
def test_one_of_text_messages_and_tokens_passes_as_it_is(given):
    reset = ResetResult(observation=Observation(**given), state=3)
    assert check_reset(reset, 102) is reset
    step = going(**given)
    assert check_step(step, None) is step


@pytest.mark.parametrize("reward", [1, 0.5, np.float32(0.25), np.int64(3), True, -3.4e38])
def test_every_real_number_is_a_reward_and_a_metric(reward):
    step = done(reward, metrics={"length": reward})
    assert check_step(step, None) is step


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned NoneType; expected rlcore.spi.StepResult"),
        (1.0, "returned float; expected"),
        (done("1"), "returned the reward '1'; expected a float"),
        (StepResult(reward=1.0, done=False), "returned done=False and no observation"),
        (done(1.0, observation=Observation(text="")), "returned done=True and an observation"),
        (StepResult(reward=1.0, done=1), "returned done=1, success=False; expected bools"),
        (done(1.0, success=np.True_), "success=np.True_; expected bools"),
        (done(1.0, metrics=[1.0]), "returned list as metrics"),
        (done(1.0, reward_components=[1.0]), "returned list as reward_components"),
        (done(1.0, reward_components={3: 1.0}), "returned a reward component called 3; expected a string"),
        (done(1.0, reward_components={"x": None}), "returned the reward component 'x' None; expected a float"),
        (StepResult(reward=1.0, done=False, observation="more"), "returned the observation str"),
        (going(), "an observation with nothing; expected exactly one"),
        (going(text="", messages=[]), "with messages and text"),
        (going(tokens=np.zeros(1)), "observation.tokens"),
        (going(tokens=np.asarray([3, -7], np.int32)), "an observation with the token -7; expected at least one, none below 0"),
        (going(tokens=np.zeros(0, np.int32)), "an observation with no tokens; expected at least one"),
        (going(text=5), "an observation with the text 5; expected text, or messages with role and content"),
        (going(text=""), "an observation with an empty text; expected text"),
        (going(messages="hi"[:0]), "an observation with an empty text"),
        (going(text="a\ud800"), "an observation with a text with half a character (the surrogate \\ud800 by itself) at"),
        (going(messages=[{"role": "user", "content": "\ud800"}]), "message 0 whose 'content' is a text with half a character"),
        (done(1.0, reward_components={"\ud800": 1.0}), "a reward component called '\\ud800', with half a character"),
        (done(1.0, metrics={"\ud800": 1.0}), "a metric called '\\ud800', with half a character"),
        (going(messages=[{"role": "assistant", "content": "a"}]), "ends with the assistant's message"),
        (going(messages=[{"role": "user"}]), "message 0 whose 'content' is NoneType, not text"),
        (done(np.complex64(1)), "returned the reward np.complex64(1+0j); expected a float"),
        (done(1.0, metrics={"x": None}), "returned the metric 'x' None; expected a float"),
        (done(1.0, metrics={"x": np.zeros(2)}), "returned the metric 'x' array([0., 0.]); expected a float"),
        (done(1.0, metrics={3: 1.0}), "returned a metric called 3; expected another name"),
        (done(1.0, metrics={"failed": 1.0}), "returned a metric called 'failed', which is the core's own"),
    ],
)
def test_what_breaks_the_contract_is_named(result, message):
    with pytest.raises(ContractError) as raised:
        check_step(result, None)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned NoneType; expected rlcore.spi.ResetResult"),
        (going(text="a"), "returned StepResult; expected rlcore.spi.ResetResult"),
        (ResetResult(observation=Observation(), state=0), "an observation with nothing"),
        (ResetResult(observation=None, state=0), "returned the observation NoneType"),
    ],
)
def test_a_reset_is_checked_alike(result, message):
    with pytest.raises(ContractError) as raised:
        check_reset(result, None)
    assert message in str(raised.value)


PARTS = {
    "no mapping": ([1.0], ContractError, "returned list as part_rewards; expected a mapping"),
    "a place that is none": ({"1": 1.0}, ContractError, "the reward of a part that ends at '1'; expected an int from 1 to 4"),
    "a beginning": ({0: 1.0}, ContractError, "ends at 0"),
    "behind the turn": ({5: 1.0}, ContractError, "ends at 5; expected an int from 1 to 4, the characters of the turn"),
    "not finite": ({2: float("nan")}, RewardError, "the reward of the part that ends at '2' nan"),
}


@pytest.mark.parametrize(("rewards", "error", "message"), PARTS.values(), ids=PARTS)
def test_rewards_of_parts_lie_within_the_turn(rewards, error, message):
    with pytest.raises(error) as raised:
        check_step(done(1.0, part_rewards=rewards), None, 4)
    assert message in str(raised.value)


def test_names_of_other_alphabets_pass():
    step = done(1.0, reward_components={"größe": 1.0}, metrics={"长度": 2.0})
    assert check_step(step, None) is step


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def test_images_come_with_the_messages_of_a_reset():
    shown = Observation(messages=[{"role": "user", "content": [{"type": "image", "image": b"a"}]}])
    assert check_reset(ResetResult(observation=shown, state=None), None).observation is shown
    with pytest.raises(ContractError, match="with images"):
        check_step(StepResult(reward=0.0, done=False, observation=shown), None)


def test_tools_come_with_the_messages_of_a_reset():
    reset = ResetResult(observation=Observation(messages=[{"role": "user", "content": "?"}], tools=[TOOL]), state=0)
    assert check_reset(reset, None) is reset


@pytest.mark.parametrize(
    "observation",
    [
        {"text": "?", "tools": [TOOL]},
        {"tools": "look"},
        {"tools": TOOL},
        {"tools": ["look"]},
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": [{"type": "function", "function": {"name": "look", "description": "\ud800"}}]},
        {"tools": [{"type": "function", "function": {"name": "look", "parameters": {1, 2}}}]},
    ],
)
def test_tools_that_no_template_could_show_are_refused(observation):
    messages = {} if "text" in observation else {"messages": [{"role": "user", "content": "?"}]}
    with pytest.raises(ContractError):
        check_reset(ResetResult(observation=Observation(**messages, **observation), state=0), None)
    with pytest.raises(ContractError):
        check_step(going(messages=[{"role": "user", "content": "?"}], tools=[TOOL]), None)


def test_tokens_are_those_of_the_model_where_it_is_known():
    beyond = going(tokens=np.asarray([3, 102], np.int32))
    assert check_step(beyond, None) is beyond
    assert check_step(beyond, 103) is beyond
    with pytest.raises(ContractError, match="token 102; .* below 102"):
        check_step(beyond, 102)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (done(float("nan")), "returned the reward nan; expected a finite number"),
        (done(np.float32("inf")), "returned the reward inf; expected a finite number"),
        (done(1e300), r"returned the reward 1e\+300; expected a finite number, as float32"),
        (done(1.0, metrics={"x": float("nan")}), "returned the metric 'x' nan; expected a finite number"),
        (done(1.0, reward_components={"x": 1e300}), "expected a finite number, as float32"),
    ],
)
def test_a_figure_that_is_not_finite_is_a_failure_of_its_episode(result, message):
    with pytest.raises(RewardError, match=message):
        check_step(result, None)
