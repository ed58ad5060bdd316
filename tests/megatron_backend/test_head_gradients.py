"""The multi-token head's gradients are measured and clipped apart from the policy's."""

import math
from pathlib import Path

import pytest
from megatron_support import make_backend, make_batch, split, step_request
from multi_token_reference import make_with_head

from rlcore.spi import CloseRequest
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.training.head_gradients import HeadGradients


def test_parts_are_apart(tmp_path: Path) -> None:
    directory = make_with_head(tmp_path / "model", "glm4_moe", num_hidden_layers=2)
    backend = make_backend(directory, config=MegatronConfig(collective_timeout_s=600.0, mtp=True, mtp_loss_weight=50.0))
    seen, update = {}, backend.update

    def see(*arguments: object) -> float:
        gradients = HeadGradients.of(backend.models, backend.optimizer)
        seen["total"] = float(backend.optimizer.get_grad_norm())
        seen["before"] = gradients.norm("policy"), gradients.norm("head")
        rate = update(*arguments)
        seen["after"] = gradients.norm("policy"), gradients.norm("head")
        return rate

    backend.update = see
    batch = make_batch()
    result = backend.train_step(step_request(split(batch, [range(6)]), batch.counts()))
    backend.close(CloseRequest())
    limit = 0.5  # of the optimizer
    assert seen["before"] == (result.grad_norm, result.metrics["mtp_grad_norm"])
    assert math.hypot(*seen["before"]) == pytest.approx(seen["total"], rel=1e-6)
    assert min(seen["before"]) > limit
    assert seen["after"] == pytest.approx((limit, limit), rel=1e-5)


def test_a_rank_without_a_part_clips_nothing(tmp_path: Path) -> None:
    """A stage without the head, or a rank that updates no element of it, has no gradients to scale."""
    directory = make_with_head(tmp_path / "model", "glm4_moe", num_hidden_layers=2)
    backend = make_backend(directory)
    seen = {}
    update = backend.update

    def see(*arguments: object) -> float:
        gradients = HeadGradients.of(backend.models, backend.optimizer)
        assert gradients.head == frozenset()
        before = gradients.norm("policy")
        gradients.clip("head", 2.0, 1.0)
        seen["kept"] = gradients.norm("policy") == before
        return update(*arguments)

    backend.update = see
    batch = make_batch()
    backend.train_step(step_request(split(batch, [range(6)]), batch.counts()))
    backend.close(CloseRequest())
    assert seen == {"kept": True}
