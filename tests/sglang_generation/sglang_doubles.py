"""A model that loads tensors as SGLang's models do, and an engine that runs the package's loader on it in this process."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlcore_sglang.scheduler import load, order_tensor


class FusedModel(torch.nn.Module):
    """Two tensors of a checkpoint in one parameter, a third in another. Names that it does not know are skipped, as there."""

    shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {"a.weight": (2, 3), "b.weight": (4, 3), "norm.weight": (3,)}

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(6, 3, dtype=dtype))
        self.norm = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        self.skips: set[str] = set()

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        places = {"a.weight": self.fused.data[:2], "b.weight": self.fused.data[2:], "norm.weight": self.norm.data}
        for name, tensor in weights:
            if name in places and name not in self.skips:
                places[name].copy_(tensor)


class LocalEngine:
    """The calls of `Engine` that a refit makes."""

    def __init__(self, model: FusedModel) -> None:
        self.model = model
        self.calls: list[str] = []
        self.is_silent = False

    def ask(self, method: str, *arguments: Any, timeout_s: float, key: str) -> None:
        assert timeout_s > 0
        assert key == "refit_timeout_s"
        self.calls.append(arguments[0]["step"] if arguments else method)
        if arguments and not self.is_silent:
            load(self.model, [("order", order_tensor(arguments[0]))])
