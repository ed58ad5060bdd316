"""An optimizer's step in parts is its whole step."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlcore_megatron.optimizer_state import MOMENTS
from rlcore_megatron.partial_step import step_in_parts


class PlayedAdam(torch.optim.Optimizer):
    """Steps as TransformerEngine's does: its groups count steps, and it copies all moments of a group before it computes."""

    name_to_dtype_map: ClassVar = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_param": torch.float32}

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8})
        self.copied: list[int] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for key in group["params"]:
                if not self.state[key]:
                    self.state[key] = {name: torch.zeros_like(key, dtype=torch.bfloat16) for name in MOMENTS}
            used = [key for key in group["params"] if key.grad is not None]
            copies = [[self.state[key][name].float() for name in MOMENTS] for key in used]
            self.copied.append(sum(key.numel() for key in used))
            for key, (mean, square) in zip(used, copies, strict=True):
                mean.lerp_(key.grad, 1 - group["betas"][0])
                square.lerp_(key.grad.square(), 1 - group["betas"][1])
                first, second = (1 - beta ** group["step"] for beta in group["betas"])
                key -= group["lr"] * (mean / first) / ((square / second).sqrt() + group["eps"])
                for name, moment in zip(MOMENTS, (mean, square), strict=True):
                    self.state[key][name].copy_(moment)


def stepped(most_elements: int | None) -> tuple[list[Tensor], PlayedAdam]:
    """The parameters after three steps, the second with another rate, and one of them without a gradient at times."""
    random = torch.Generator().manual_seed(0)
    sizes = [(5, 3, 40, 8), (), (6,)]
    groups = [[torch.nn.Parameter(torch.randn(size, generator=random)) for size in group] for group in sizes]
    optimizer = PlayedAdam([{"params": group} for group in groups])
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


@pytest.mark.parametrize("most_elements", [1, 8, 16, 10**6])
def test_a_step_in_parts_is_the_whole_step(most_elements: int) -> None:
    (whole, plain), (parts, divided) = stepped(None), stepped(most_elements)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert max(plain.copied) == 53
    assert max(divided.copied) == max(40, min(most_elements, 53))
    assert [group.get("step") for group in divided.param_groups] == [group.get("step") for group in plain.param_groups]
    assert [len(group["params"]) for group in divided.param_groups] == [4, 0, 1]


def test_a_step_that_fails_leaves_the_groups_whole() -> None:
    _, optimizer = stepped(8)
    optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"] = None
    with pytest.raises(AttributeError):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0, 1]
