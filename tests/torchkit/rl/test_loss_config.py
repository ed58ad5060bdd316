"""What the options of the loss become in a run."""

import pytest

from rlcore.spi import AlgorithmContext
from rlcore_torchkit.rl.loss_config import LossConfig


@pytest.mark.parametrize(("exact", "expected"), [(True, "generation"), (False, "trainer")])
def test_the_samplers_logprobs_are_taken_where_they_are_exact(exact, expected):
    context = AlgorithmContext(
        seed=0, samples_per_prompt=2, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=exact
    )
    assert LossConfig().resolved(context) == LossConfig(previous_logprobs=expected)
    for given in ("generation", "trainer"):
        assert LossConfig(previous_logprobs=given).resolved(context).previous_logprobs == given


@pytest.mark.parametrize("options", [{"geometric_minimum": 0.5}, {"geometric_maximum": 1.5}, {"objective": "kl_cov"}])
def test_exact_logprobs_do_not_stand_for_the_trainers_where_the_two_are_compared(options):
    context = AlgorithmContext(
        seed=0, samples_per_prompt=2, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=True
    )
    assert LossConfig(**options).resolved(context) == LossConfig(**options, previous_logprobs="trainer")


@pytest.mark.parametrize(
    ("options", "corrects"),
    [
        ({"previous_logprobs": "generation"}, True),
        ({"previous_logprobs": "generation", "objective": "policy_gradient"}, False),
        ({"previous_logprobs": "trainer"}, True),
        ({"previous_logprobs": "trainer", "objective": "policy_gradient"}, True),
        ({"previous_logprobs": "trainer", "importance_correction": "sequence"}, True),
        ({"previous_logprobs": "trainer", "importance_correction": "none"}, False),
    ],
)
def test_stale_samples_need_a_ratio_to_their_generator(options, corrects):
    assert LossConfig(**options).corrects_staleness == corrects
