"""The terms of a loss, taken from it as from a black box: by its values and derivatives alone.

A loss of the policy gradient is positively homogeneous in the advantages, so that a token's part of it is A ∂L/∂A (Euler). It
is linear in the entropies. Where all log-probabilities are equal and every advantage is -1, a token's part is its weight. The
KL divergence of a token from the reference is the integral of ∂L/∂reference on the way from no divergence to the whole.

Shapes: N sequences of R tokens, as in `contract`. All terms are 0 outside of the mask.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore_bundles.peers.contract import Update

Loss = Callable[[Update], tuple[Tensor, Mapping[str, float]]]
TERMS = (
    "loss mask",
    "token weights",
    "importance weights",
    "log ratio",
    "policy loss",
    "KL term",
    "entropy weights",
    "policy loss, sum",
    "KL term, sum",
    "loss",
    "gradient",
)
"""The terms in the order in which they follow from each other."""
NUM_POINTS = 16
"""Points of the Gauss-Legendre quadrature: exact to 1e-11 for an estimate of up to 20 nats."""

NEAR = 0.5
"""Greatest log ratio, in nats, at which it is read off: no dual clip is below exp of it."""


class LossTerms:
    """The terms of one loss on one update. `has_ratio`: its objective is the clipped ratio times the advantage."""

    def __init__(self, loss: Loss, update: Update, *, has_ratio: bool, has_kl: bool, has_entropy: bool) -> None:
        self._loss, self._update = loss, update
        self._has = {"importance weights": has_ratio, "log ratio": has_ratio, "KL term": has_kl, "KL term, sum": has_kl}
        self._has["entropy weights"] = has_entropy
        self._found: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The terms that the loss has."""
        return [name for name in TERMS if self._has.get(name, True)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._found:
            self._found[name] = self._computed(name)
        return self._found[name]

    def _computed(self, name: str) -> Tensor:
        match name:
            case "loss mask":
                return (self["token weights"] != 0).to(self._update.logprobs.dtype)
            case "token weights":
                one = torch.ones_like(self._update.logprobs)
                same = {"logprobs": one, "previous": one, "generation": one, "reference": one}
                return self._part(advantages=-one, **same)
            case "importance weights":
                return self._importance_weights()
            case "log ratio":
                return self._log_ratio()
            case "policy loss":
                return self._weighed(self._policy_part)
            case "policy loss, sum":
                return self._policy_part.sum()
            case "KL term":
                return self._weighed(self._kl_part)
            case "KL term, sum":
                return self._kl_part.sum()
            case "entropy weights":
                return self._derivative("entropies")
            case "loss":
                return self._loss(self._update)[0].detach()
            case _:
                return self._derivative("logprobs")

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics that the loss reports."""
        return dict(self._loss(self._update)[1])

    def _derivative(self, of: str, **changes: Any) -> Tensor:
        """[N, R]: the loss's derivative with respect to a column."""
        update = replace(self._update, **changes)
        leaf = getattr(update, of).detach().clone().requires_grad_()
        value, _ = self._loss(replace(update, **{of: leaf}))
        found = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
        found = torch.zeros_like(leaf) if found is None else found
        return torch.where(update.mask, found, torch.zeros_like(found))

    def _part(self, **changes: Any) -> Tensor:
        """[N, R]: each token's part of the policy's loss."""
        advantages = changes.get("advantages", self._update.advantages)
        return torch.where(self._update.mask, advantages, torch.zeros_like(advantages)) * self._derivative(
            "advantages", **changes
        )

    def _weighed(self, part: Tensor) -> Tensor:
        """[N, R]: a part of the loss without the token's weight."""
        weights = self["token weights"]
        return torch.where(weights != 0, part / weights, torch.zeros_like(part))

    def _importance_weights(self) -> Tensor:
        # A mask of tokens may hold for one sign of the advantage alone.
        one, update = torch.ones_like(self._update.logprobs), self._update
        rising = -self._part(advantages=one, logprobs=update.previous)
        falling = self._part(advantages=-one, logprobs=update.previous)
        return self._weighed(torch.where(rising.abs() > falling.abs(), rising, falling))

    def _log_ratio(self) -> Tensor:
        # A clip bounds the ratio from above where A > 0 and from below where A < 0: below 1 the first is free, above the other.
        # Log-probabilities nearer to the previous ones keep a dual clip away too.
        one, away = torch.ones_like(self._update.logprobs), self._update.logprobs - self._update.previous
        times = max(1.0, float(away.abs().max()) / NEAR, float(away.sum(1).abs().max()) / NEAR)
        near = self._update.previous + away / times
        low = -self._weighed(self._part(advantages=one, logprobs=near))
        high = self._weighed(self._part(advantages=-one, logprobs=near))
        weights = self["importance weights"]
        ratio = torch.where((low < weights) & (low > 0), low, high)
        is_there = (weights != 0) & (ratio > 0)
        return torch.where(is_there, times * torch.log(torch.where(is_there, ratio / weights, one)), torch.zeros_like(ratio))

    @cached_property
    def _policy_part(self) -> Tensor:
        return self._part()

    @cached_property
    def _kl_part(self) -> Tensor:
        update = self._update
        points, weights = np.polynomial.legendre.leggauss(NUM_POINTS)
        away = update.reference - update.logprobs
        total = torch.zeros_like(away)
        for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
            reference = update.logprobs + float(point) * away
            total = total + float(weight) * self._derivative("reference", reference=reference)
        return total * away
