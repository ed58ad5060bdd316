"""Episodes of one turn: prompts, scores and metrics."""

import asyncio

import numpy as np
import pytest

from rlcore.spi import ConfigError, DataError, EnvironmentContext, FinishReason, Turn
from rlcore_reasoning_gym.config import FamilyConfig, ReasoningGymConfig
from rlcore_reasoning_gym.environment import ReasoningGymEnvironment

CONTEXT = EnvironmentContext(seed=0)


def environment(**families):
    config = ReasoningGymConfig(families=families, num_train=40, num_evaluation=5, num_processes=1, scoring_timeout_s=1.0)
    return ReasoningGymEnvironment(CONTEXT, config)


def turn(text):
    return Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)


def test_scores_are_rewards_whatever_an_answer_does_to_the_process():
    backend = environment(
        chain_sum=FamilyConfig(levels=(1,), options={"max_digits": 2}),
        countdown=FamilyConfig(),
        palindrome_generation=FamilyConfig(),
        spiral_matrix=FamilyConfig(),
    )
    rows = {row["family"]: row for row in backend.rows("train")}

    async def step(family, text):
        state = (await backend.reset(rows[family], 0)).state
        return await backend.step(state, turn(text))

    async def check():
        right = await step("chain_sum", rows["chain_sum"]["completion"])
        assert (right.reward, right.success, right.done) == (1.0, True, True)
        assert right.metrics == {
            "score_chain_sum_level_1": 1.0,
            "answered": 1.0,
            "scoring_timed_out": 0.0,
            "scoring_failed": 0.0,
        }
        part = await step("palindrome_generation", "<answer>no palindrome</answer>")
        assert 0.0 < part.reward < 1.0
        assert not part.success
        assert part.metrics["score_palindrome_generation"] == part.reward
        slow = await step("countdown", "<answer>9**9**9**9</answer>")
        assert (slow.reward, slow.metrics["scoring_timed_out"], slow.metrics["scoring_failed"]) == (0.0, 1.0, 0.0)
        crashed = await step("spiral_matrix", "<answer>exit()</answer>")
        assert (crashed.reward, crashed.metrics["scoring_timed_out"], crashed.metrics["scoring_failed"]) == (0.0, 0.0, 1.0)
        assert (await step("countdown", rows["countdown"]["completion"])).success

    try:
        asyncio.run(check())
    finally:
        backend.close()


def test_a_response_without_an_answer_earns_nothing():
    """It starts no process either."""
    backend = environment(countdown=FamilyConfig())
    state = asyncio.run(backend.reset(backend.rows("train")[0], 0)).state
    result = asyncio.run(backend.step(state, turn("1 + 1")))
    assert (result.reward, result.success, result.metrics["answered"]) == (0.0, False, 0.0)


@pytest.mark.parametrize(
    "row", [{"prompt": "1+1"}, {"family": "gcd", "entry": {}}, {"prompt": "1", "family": "lcm", "entry": {}}]
)
def test_rows_of_something_else_are_refused(row):
    with pytest.raises(DataError, match="entry"):
        asyncio.run(environment(gcd=FamilyConfig()).reset(row, 0))


def test_a_section_with_problems_is_refused():
    with pytest.raises(ConfigError, match="chain_sum"):
        environment(chian_sum=FamilyConfig())
