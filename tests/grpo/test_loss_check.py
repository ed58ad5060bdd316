"""Options of the loss that do not go together."""

from attrs import evolve

from rlcore_grpo.loss_check import loss_problems
from rlcore_grpo.loss_config import LossConfig


def test_constant_length_belongs_to_constant_normalisation_alone():
    good = LossConfig(loss_normalisation="constant", constant_length=32)
    assert not loss_problems(good)
    assert not loss_problems(LossConfig())
    for wrong in (evolve(good, constant_length=None), evolve(good, loss_normalisation="token")):
        (problem,) = loss_problems(wrong)
        assert problem.path == "algorithm.grpo.constant_length"
        assert "rollout.max_response_tokens" in problem.remedy
