"""Steps of `[optimizer]` by torch's own optimizers in one process, over the tensors that a model's files name."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from megatron_support import WEIGHTED, Reference, in_files, reference_backward
from optimizer_reference import LEAST_8BIT
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlcore.spi import MuonSpec, OptimizerSpec, TokenBatch
from rlcore_torchkit.optimizer.moments import Columns, decode, encode

FILE = "model.safetensors"


class FileOptimizer:
    """torch.optim.Muon for matrices of the decoder's layers, torch.optim.AdamW for all else, by tensors of files."""

    def __init__(self, tensors: Mapping[str, Tensor], spec: OptimizerSpec) -> None:
        """`tensors` are those that train."""
        self.spec, self._steps = spec, 0
        self.leaves = {name: [nn.Parameter(part.clone()) for part in _matrices(name, whole)] for name, whole in tensors.items()}
        self._stacked = {name for name, whole in tensors.items() if len(self.leaves[name]) > 1 or _is_stack(name, whole)}
        self._moments: dict[str, list[list[Tensor]]] = {}
        muon, adamw, self._narrow = [], [], []
        for name, whole in tensors.items():
            group = self._group(name)
            weight_decay = spec.weight_decay if group.get("weight_decay") is None else group["weight_decay"]
            settings = {
                "params": self.leaves[name],
                "lr": group.get("learning_rate") or spec.learning_rate,
                "weight_decay": weight_decay if whole.ndim > 1 and not name.endswith("bias") else 0.0,
            }
            if spec.name == "muon" and not group.get("name") and _is_weight_matrix(name, whole):
                muon.append(settings)
                continue
            settings["betas"] = group.get("betas") or spec.betas
            if spec.moments == "8bit" and whole.ndim > 1 and whole.numel() >= LEAST_8BIT:
                self._narrow.append((name, settings))
            else:
                adamw.append(settings)
        options = spec.muon or MuonSpec()
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw, eps=spec.eps, foreach=False)]
        if muon:
            self.optimizers.append(
                torch.optim.Muon(
                    muon,
                    momentum=options.momentum,
                    nesterov=options.nesterov,
                    ns_steps=options.newton_schulz_steps,
                    adjust_lr_fn=options.scale,
                )
            )

    def _group(self, name: str) -> dict[str, Any]:
        for group in self.spec.groups:
            if any(fnmatchcase(name, pattern) for pattern in group.parameters):
                return {key: getattr(group, key) for key in ("name", "learning_rate", "betas", "weight_decay")}
        return {}

    def step(self, gradients: Mapping[str, Tensor]) -> float:
        """Clip the gradients to spec.max_grad_norm, and step; returns their norm before."""
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        scale = min(1.0, self.spec.max_grad_norm / (norm + 1e-6))
        for name, leaves in self.leaves.items():
            for leaf, part in zip(leaves, _matrices(name, gradients[name]), strict=True):
                leaf.grad = part.clone() * scale
        for optimizer in self.optimizers:
            optimizer.step()
        self._steps += 1
        for name, settings in self._narrow:
            self._step_narrow(name, settings)
        return norm

    @torch.no_grad()
    def _step_narrow(self, name: str, settings: Mapping[str, Any]) -> None:
        """AdamW, after which each moment is rounded to the codes of the blocks of its rows."""
        (beta, beta_of_squares), count = settings["betas"], self._steps
        moments = self._moments.setdefault(name, [[torch.zeros_like(leaf)] * 2 for leaf in self.leaves[name]])
        for leaf, kept in zip(self.leaves[name], moments, strict=True):
            gradient = leaf.grad
            mean = kept[0] * beta + gradient * (1 - beta)
            square = kept[1] * beta_of_squares + gradient.square() * (1 - beta_of_squares)
            leaf.mul_(1 - settings["lr"] * settings["weight_decay"])
            root = (square / (1 - beta_of_squares**count)).sqrt() + self.spec.eps
            leaf.sub_(settings["lr"] * mean / (1 - beta**count) / root)
            columns = Columns(first=0, stop=leaf.shape[-1], width=leaf.shape[-1])
            for number, moment in enumerate((mean, square)):
                scales = columns.scales(moment)
                codes = encode(moment, scales, columns, signed=number == 0)
                kept[number] = decode(codes, scales, columns, signed=number == 0)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors, whole."""
        return {
            name: torch.stack([leaf.detach() for leaf in leaves]) if name in self._stacked else leaves[0].detach().clone()
            for name, leaves in self.leaves.items()
        }


def _is_stack(name: str, whole: Tensor) -> bool:
    return whole.ndim == 3 and ".experts." in name


def _matrices(name: str, whole: Tensor) -> Sequence[Tensor]:
    """Each expert's matrix of a stack; the tensor itself."""
    return list(whole) if _is_stack(name, whole) else [whole]


def _is_weight_matrix(name: str, whole: Tensor) -> bool:
    shape = whole.shape[1:] if _is_stack(name, whole) else whole.shape
    return ".layers." in name and len(shape) == 2 and min(shape) > 1 and not name.endswith("bias")


def expected_steps(model: Path, spec: OptimizerSpec, batches: Sequence[TokenBatch], folder: Path) -> dict[str, Any]:
    """Weights before and after the steps, losses and norms of the gradients, by plain transformers and torch."""
    files = load_file(model / FILE)
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.name != FILE:
            (folder / path.name).write_bytes(path.read_bytes())
    optimizer, losses, norms = None, [], []
    save_file(files, folder / FILE, metadata={"format": "pt"})
    for batch in batches:
        reference = Reference(folder)
        losses.append(reference_backward(reference, batch, WEIGHTED))
        gradients = in_files(reference.model, reference.gradients())
        optimizer = optimizer or FileOptimizer({name: files[name] for name in gradients}, spec)
        norms.append(optimizer.step(gradients))
        save_file(files | optimizer.tensors(), folder / FILE, metadata={"format": "pt"})
    return {"before": files, "weights": load_file(folder / FILE), "losses": losses, "norms": norms}
