"""Prompts without rewards."""

import asyncio

import numpy as np
import pytest

from rlcore.spi import DataError, EnvironmentContext, FinishReason, Turn
from rlcore_distill.config import UnrewardedConfig
from rlcore_distill.environment import Unrewarded

ENVIRONMENT = Unrewarded(EnvironmentContext(seed=0), UnrewardedConfig())


@pytest.mark.parametrize(("prompt", "form"), [("2+2=", "text"), ([{"role": "user", "content": "2+2?"}], "messages")])
def test_a_prompt_is_all_that_a_row_needs(prompt, form):
    found = asyncio.run(ENVIRONMENT.reset({"prompt": prompt}, 0))
    assert getattr(found.observation, form) == prompt
    if form == "messages":
        assert asyncio.run(ENVIRONMENT.reset({"prompt": prompt, "tools": ({},)}, 0)).observation.tools == ({},)
    turn = Turn(text="4", tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)
    step = asyncio.run(ENVIRONMENT.step(found.state, turn))
    assert (step.reward, step.done) == (0.0, True)


def test_a_row_without_one_is_refused():
    with pytest.raises(DataError, match="'question'"):
        asyncio.run(ENVIRONMENT.reset({"question": "2+2="}, 0))
