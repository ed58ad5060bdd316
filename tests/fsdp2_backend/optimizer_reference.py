"""torch.optim.Muon, and AdamW with torchao's moments, over the tensors of a checkpoint, each a leaf of its own."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from fsdp2_support import Reference
from torch import Tensor, nn

from rlcore.spi import MuonSpec, OptimizerSpec, TokenBatch
from rlcore_torchkit.optimizer import muon, settings

LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(experts\.\d+\.)?(gate|up|down)_proj|mlp\.gate)\.weight")
"""The matrices of Qwen2, Qwen3 and Qwen3-MoE as their checkpoints name them: projections, experts and routers."""
STACKS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
"""By a matrix of an expert: the stack that transformers has it in, and which half of that."""
LEAST_8BIT = 256
"""Elements of the smallest tensor with moments in 8 bits in these tests, whose models are small."""


class OptimizerReference(Reference):
    """Plain transformers, one sequence at a time, whose checkpoint's tensors torch's and torchao's optimizers train."""

    def __init__(self, directory: Path, spec: OptimizerSpec) -> None:
        super().__init__(directory, spec)
        self.leaves = {name: nn.Parameter(part.detach().clone()) for name, part in self._parts("data").items()}
        self._moments: dict[str, Any] = {}
        self._steps = 0
        self._others = {
            name: self._adamw(name, leaf)
            for name, leaf in self.leaves.items()
            if not (spec.name == "muon" and LINEAR.fullmatch(name) and self._setting(name, "name") != "adamw")
        }
        options = spec.muon or MuonSpec()
        self._muon = [
            torch.optim.Muon(
                [leaf],
                lr=self._setting(name, "learning_rate") or spec.learning_rate,
                weight_decay=spec.weight_decay,
                momentum=options.momentum,
                nesterov=options.nesterov,
                ns_steps=options.newton_schulz_steps,
                adjust_lr_fn=options.scale,
            )
            for name, leaf in self.leaves.items()
            if name not in self._others
        ]

    def _setting(self, name: str, key: str) -> Any:
        for group in self.spec.groups:
            if any(fnmatchcase(name, pattern) for pattern in group.parameters):
                return getattr(group, key)
        return None

    def _adamw(self, name: str, leaf: nn.Parameter) -> torch.optim.Optimizer | None:
        """torch's, or None where torchao's formula keeps the moments in 8 bits."""
        if self.spec.moments == "8bit" and leaf.ndim > 1 and leaf.numel() >= LEAST_8BIT:
            return None
        return torch.optim.AdamW([leaf], fused=False, foreach=False, **self._options(name, leaf))

    def _options(self, name: str, leaf: nn.Parameter) -> dict[str, Any]:
        decay = self._setting(name, "weight_decay")
        decays = leaf.ndim > 1 and not name.endswith("bias")
        return {
            "lr": self._setting(name, "learning_rate") or self.spec.learning_rate,
            "betas": self._setting(name, "betas") or self.spec.betas,
            "eps": self.spec.eps,
            "weight_decay": (self.spec.weight_decay if decay is None else decay) if decays else 0.0,
        }

    def _parts(self, attribute: str) -> dict[str, Tensor]:
        """Views of the parameters' data or gradients by the checkpoint's names."""
        found = {}
        for name, parameter in self.model.named_parameters():
            tensor, match = getattr(parameter, attribute), re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
            if match is None:
                found[name] = tensor
                continue
            for key, (stack, half) in STACKS.items():
                if stack == match[2]:
                    size = tensor.shape[1] // (2 if stack == "gate_up_proj" else 1)
                    for expert, matrix in enumerate(tensor):
                        found[f"{match[1]}.{expert}.{key}.weight"] = matrix[half * size : (half + 1) * size]
        return found

    def step(self, batch: TokenBatch) -> tuple[float, float]:
        loss = self.backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.max_grad_norm)
        for name, gradient in self._parts("grad").items():
            self.leaves[name].grad = gradient.clone()
        self._steps += 1
        for optimizer in (*self._muon, *filter(None, self._others.values())):
            optimizer.step()
        for name, optimizer in self._others.items():
            if optimizer is None:
                self._eight_bit_step(name)
        with torch.no_grad():
            for name, part in self._parts("data").items():
                part.copy_(self.leaves[name])
        self.model.zero_grad()
        return loss, norm.item()

    @torch.no_grad()
    def _eight_bit_step(self, name: str) -> None:
        """Moments in blocks of whole rows, which have no more than 256 elements here."""
        from torchao.optim.adam import single_param_adam
        from torchao.optim.subclass_8bit import OptimState8bit

        leaf = self.leaves[name]
        if name not in self._moments:
            size = leaf.shape[-1]
            assert size <= 256
            self._moments[name] = [OptimState8bit.zeros(leaf.shape, signed, size) for signed in (True, False)]
        options = self._options(name, leaf)
        single_param_adam(
            leaf.detach(),
            leaf.grad,
            torch.tensor(float(self._steps)),
            *self._moments[name],
            None,
            options["lr"],
            *options["betas"],
            options["weight_decay"],
            options["eps"],
            IS_ADAMW=True,
            BF16_STOCHASTIC_ROUND=False,
        )

    def weights(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint now."""
        return {name: leaf.detach().clone() for name, leaf in self.leaves.items()}


def exact_orthogonalized(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """float32 [A, B]: the iteration of torch.optim.Muon in float64, in which small singular values lose nothing."""
    a, b, c = coefficients
    current = gradient.double()
    current = current / current.norm().clamp(min=eps)
    for _ in range(steps):
        gram = current.T @ current
        current = a * current + current @ (b * gram + c * gram @ gram)
    return current.float()


def use_exact_iterations() -> None:
    """Let this process compute Muon's iterations in float64, those of torch by a formula of its own, and keep moments of small
    tensors in 8 bits."""
    settings.LEAST_8BIT = LEAST_8BIT
    muon.PRECISION = torch.float64
    torch.optim._muon._zeropower_via_newtonschulz = exact_orthogonalized


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, float]:
    """Root mean squares of what tensors are apart, as shares of what they have moved by."""
    assert found.keys() == expected.keys()
    moved = {name: (tensor - before[name]).norm().item() for name, tensor in expected.items()}
    return {name: (found[name].cpu() - tensor).norm().item() / max(moved[name], 1e-12) for name, tensor in expected.items()}
