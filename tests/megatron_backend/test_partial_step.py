"""An optimizer's step in parts is its whole step, with fewer copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore_megatron.training.optimizer_state import MOMENTS
from rlcore_megatron.training.partial_step import step_in_parts


class PlayedAdam(torch.optim.Optimizer):
    """Steps as TransformerEngine's does: its groups count steps; it copies all that it keeps narrow of a group before it
    computes, a tensor at a time, and writes it back so; float16 has a scale."""

    def __init__(self, groups: list[dict[str, Any]], square_dtype: torch.dtype) -> None:
        super().__init__(groups, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8})
        self.name_to_dtype_map = {"exp_avg": torch.bfloat16, "exp_avg_sq": square_dtype, "master_param": torch.float32}
        self.stepped: list[int] = []
        self.copied: list[tuple[str, int]] = []
        self.scales: dict[Tensor, Tensor] = {}

    def get_unscaled_state(self, key: Tensor, name: str) -> Tensor:
        self.copied.append((name, key.numel()))
        narrow = self.state[key][name]
        return narrow.float() * self.scales[key] if narrow.dtype == torch.float16 else narrow.float()

    def _apply_scale(self, name: str, copy: Tensor, narrow: Tensor, scale: Tensor) -> None:
        self.copied.append((name, narrow.numel()))
        if narrow.dtype == torch.bfloat16:
            narrow.copy_(copy.bfloat16())
            return
        torch.div(copy.abs().max(), 60000, out=scale)
        narrow.copy_(copy / scale)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for key in group["params"]:
                if not self.state[key]:
                    self.scales[key] = torch.ones(())
                    self.state[key] = {name: torch.zeros_like(key, dtype=self.name_to_dtype_map[name]) for name in MOMENTS}
            used = [key for key in group["params"] if key.grad is not None]
            copies = [[self.get_unscaled_state(key, name) for name in MOMENTS] for key in used]
            self.stepped.append(sum(key.numel() for key in used))
            for key, (mean, square) in zip(used, copies, strict=True):
                mean.lerp_(key.grad, 1 - group["betas"][0])
                square.lerp_(key.grad.square(), 1 - group["betas"][1])
                first, second = (1 - beta ** group["step"] for beta in group["betas"])
                key -= group["lr"] * (mean / first) / ((square / second).sqrt() + group["eps"])
            for number, name in enumerate(MOMENTS):
                for key, of_key in zip(used, copies, strict=True):
                    self._apply_scale(name, of_key[number], self.state[key][name], self.scales[key])


def stepped(most_elements: int | None, square_dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], PlayedAdam]:
    """The parameters after three steps, the second with another rate, and one of them without a gradient at times."""
    random = torch.Generator().manual_seed(0)
    sizes = [(5, 3, 40, 8), (), (6,)]
    groups = [[torch.nn.Parameter(torch.randn(size, generator=random)) for size in group] for group in sizes]
    optimizer = PlayedAdam([{"params": group} for group in groups], square_dtype)
    if most_elements is not None:
        step_in_parts(SimpleNamespace(optimizer=optimizer, is_stub_optimizer=False), most_elements)
    parameters = [parameter for group in groups for parameter in group]
    for number in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (number + 1)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        parameters[number].grad = None
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("square_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("most_elements", [1, 8, 16, 10**6])
def test_a_step_in_parts_is_the_whole_step(most_elements: int, square_dtype: torch.dtype) -> None:
    (whole, plain), (parts, divided) = stepped(None, square_dtype), stepped(most_elements, square_dtype)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert max(plain.stepped) == 53
    assert max(divided.stepped) == max(40, min(most_elements, 53))
    assert [group.get("step") for group in divided.param_groups] == [group.get("step") for group in plain.param_groups]
    assert [len(group["params"]) for group in divided.param_groups] == [4, 0, 1]
    for key, other in zip(plain.state.values(), divided.state.values(), strict=True):
        assert all(torch.equal(key[name], other[name]) for name in MOMENTS)


@pytest.mark.parametrize("square_dtype", [torch.bfloat16, torch.float16])
def test_what_is_kept_in_bfloat16_is_copied_by_calls_for_a_part(square_dtype: torch.dtype) -> None:
    """Behind the first step, which makes it; what has a scale is copied a tensor at a time."""
    _, optimizer = stepped(16, square_dtype)
    optimizer.copied.clear()
    optimizer.step()
    assert {name for name, _ in optimizer.copied} == ({"exp_avg_sq"} if square_dtype == torch.float16 else set())


def test_a_step_that_fails_leaves_the_groups_whole() -> None:
    _, optimizer = stepped(8)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0, 1]
    assert not {"get_unscaled_state", "_apply_scale"} & vars(optimizer).keys()
