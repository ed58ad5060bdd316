"""The router's losses on one rank against their formulas in float64; whole models in layouts are compared in test_layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron_weights_cases import Opened, opened
from torch import Tensor

from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.modules.auxiliary_loss import PolicyRouter, coefficients
from rlcore_megatron.modules.model_config import transformer_config
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu
from rlcore_torchkit.testing.models import make_model

WEIGHTS = {
    "load_balancing_loss": 0.5,
    "seq_load_balancing_loss": 0.3,
    "global_load_balancing_loss": 0.4,
    "z_loss": 0.01,
}
ALL = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3, 0.4],
    "moe_z_loss_coeff": 0.01,
}
SEQUENCES = torch.tensor([0, 0, 0, 1, 1, 2, -1, -1])
"""Of each token; the last two are padding."""
SHARE = 0.125
"""Of the step's tokens that each is."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    directory: Path = make_model(tmp_path_factory.mktemp("routers") / "model", "qwen3_moe")
    with opened(directory, ParallelLayout()) as model:
        yield model


def config_of(model: Opened, table: dict[str, Any]) -> Any:
    return transformer_config(model.hf, MegatronConfig(transformer=table), model.layout, "float32", "cpu")


def make_router(model: Opened, table: dict[str, Any]) -> PolicyRouter:
    return PolicyRouter(config_of(model, table), ProcessGroupCollection.use_mpu_process_groups())


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({}, {}),
        (ALL, WEIGHTS),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.2}, {"seq_load_balancing_loss": 0.2}),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.1}, {"z_loss": 0.1}),
    ],
)
def test_losses_that_are_on_go_by_their_metrics(table: dict, found: dict, model: Opened) -> None:
    assert coefficients(config_of(model, table)) == found


def losses(logits: Tensor, top_k: int, seen: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens; `seen` float64 [E], how often experts were chosen in this step, counts on."""
    own = SEQUENCES >= 0
    logits, sequences = logits[own], SEQUENCES[own]
    num_experts = logits.shape[1]
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(top_k).indices, 1.0).detach()
    seen += chosen.sum(0)
    by_sequence = torch.stack([chosen[sequences == sequence].sum(0) for sequence in sequences])
    frequencies = {"load_balancing_loss": chosen.sum(0, keepdim=True), "seq_load_balancing_loss": by_sequence}
    frequencies["global_load_balancing_loss"] = seen[None].clone()
    found = {
        name: num_experts * (counts / counts.sum(-1, keepdim=True) * logits.softmax(-1)).sum()
        for name, counts in frequencies.items()
    }
    return found | {"z_loss": logits.logsumexp(-1).square().sum()}


def test_values_and_gradients_are_those_of_the_formulas(model: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1))  # as schedules set it, once for all
    with cuda_or_cpu("cpu"):
        router = make_router(model, ALL)
        router.begin(torch.tensor(SHARE, dtype=torch.float64))
        router.sequences, router.num_sequences = SEQUENCES, 3
        seen, sums = torch.zeros(router.num_experts, dtype=torch.float64), dict.fromkeys(WEIGHTS, 0.0)
        for seed in range(2):  # microbatches of one step
            logits = torch.randn(8, router.num_experts, generator=torch.Generator().manual_seed(seed))
            upstream = torch.randn(8, router.num_experts)
            ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
            attached = router.apply_z_loss(ours)
            assert torch.equal(attached, logits), "only gradients are attached"
            (attached * upstream).sum().backward()
            found = losses(exact, router.topk, seen)
            whole = torch.stack([weight * found[name] for name, weight in WEIGHTS.items()]).sum() * SHARE
            (whole + (exact * upstream).sum()).backward()
            torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=1e-5)
            sums = {name: value + found[name].item() * SHARE for name, value in sums.items()}
            assert {name: value.item() for name, value in router.sums().items()} == pytest.approx(sums, rel=1e-5)
        router.begin(torch.tensor(SHARE, dtype=torch.float64))
        assert router.sums() == {}


def test_a_pass_without_gradients_counts_for_nothing(model: Opened) -> None:
    with cuda_or_cpu("cpu"):
        router, logits = make_router(model, ALL), torch.randn(8, 4)
        router.begin(torch.tensor(SHARE, dtype=torch.float64))
        with torch.no_grad():
            assert router.apply_z_loss(logits) is logits
        assert make_router(model, {}).apply_z_loss(logits) is logits
        assert router.sums() == {}
