"""Loss and advantages against numbers that TRL's own code computed, which make_trl_numbers.py wrote down."""

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS, TokenBatch
from rlcore_grpo.check import check
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.policy_gradient import policy_gradient_loss

from .grpo_rollouts import advantages_of, make_rollouts

NUMBERS = json.loads(Path(__file__).with_name("trl_numbers.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def batch():
    """Sequences of one token of a prompt and the completion."""
    lengths = np.array(NUMBERS["lengths"]) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], bool)
    mask[offsets[:-1]] = False
    names = {"generation": GENERATION_LOGPROBS, "previous": PREVIOUS_LOGPROBS, "reference": REFERENCE_LOGPROBS}
    columns = {column: np.array(NUMBERS[name], np.float32) for name, column in names.items()}
    advantages = np.where(mask, np.repeat(NUMBERS["advantages"], lengths), 0.0).astype(np.float32)
    return TokenBatch(
        tokens=np.zeros(len(mask), np.int32),
        offsets=offsets,
        loss_mask=mask,
        token_columns={**columns, ADVANTAGES: advantages},
    )


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=lambda case: case["name"])
def test_loss_and_gradient_are_those_of_trl(batch, make_inputs, case):
    config = GrpoConfig(**case["options"])
    assert not check(None, config)
    inputs = make_inputs(batch, NUMBERS["current"], NUMBERS["entropy"])
    output = policy_gradient_loss(inputs, config)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(inputs.logprobs.grad, case["gradient"], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("case", NUMBERS["advantage_cases"], ids=lambda case: case["name"])
def test_advantages_are_those_of_trl(case):
    config = GrpoConfig(**case["options"])
    assert not check(None, config)
    components = {name: np.array(values, np.float32) for name, values in NUMBERS["rewards"].items()}
    rewards = components["right"] + np.float32(0.25) * components["short"]
    groups = np.arange(len(rewards)) // NUMBERS["num_generations"]
    rollouts = evolve(make_rollouts(rewards, groups, response=1), reward_components=components)
    found = advantages_of(config, rollouts)[rollouts.batch.loss_mask]
    np.testing.assert_allclose(found, case["advantages"], rtol=1e-5, atol=1e-6)
