"""The environment of the fakes: rewards and rows."""

import asyncio

import numpy as np

from rlcore.spi import (
    EnvironmentContext,
    FinishReason,
    Turn,
)
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.tokenizer import FakeTokenizer


def turn(text):
    tokens = np.array(FakeTokenizer().encode(text), np.int32)
    return Turn(text=text, tokens=tokens, finish_reason=FinishReason.STOP)


def test_the_environment_rewards_the_share_of_its_letter_over_turns():
    environment = FakeEnvironment(EnvironmentContext(seed=0), FakeEnvironmentConfig(target="e", num_turns=2))

    async def play():
        begun = await environment.reset(environment.rows("train")[0], 0)
        first = await environment.step(begun.state, turn("eeab"))
        return begun, first, await environment.step(first.state, turn("eeee"))

    begun, first, second = asyncio.run(play())
    assert begun.observation.text == environment.rows("train")[0]["prompt"]
    assert (first.reward, first.done, first.success) == (0.5, False, False)
    assert first.observation is not None
    assert (second.reward, second.done, second.success, second.observation) == (1.0, True, True, None)


def test_the_environments_rows_are_distinct_and_follow_the_seed():
    config = FakeEnvironmentConfig(num_train_rows=900, num_evaluation_rows=100)
    one, same, other = (FakeEnvironment(EnvironmentContext(seed=seed), config) for seed in (0, 0, 1))
    prompts = [row["prompt"] for split in ("train", "evaluation") for row in one.rows(split)]
    assert len(set(prompts)) == 1000
    assert one.rows("train") == same.rows("train")
    assert one.rows("train") != other.rows("train")
    assert one.rows("validation") is None
    assert all(FakeTokenizer().decode(FakeTokenizer().encode(prompt)) == prompt for prompt in prompts)
