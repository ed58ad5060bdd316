"""Norms and clipping of the multi-token head's gradients, apart from the policy's: neither changes the other's step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from attrs import frozen
from megatron.core.optimizer import MegatronOptimizer

from rlcore_megatron.families.weight_source import MULTI_TOKEN_HEAD
from rlcore_megatron.modules.model import unwrapped
from rlcore_megatron.training.optimizer import clip
from rlcore_megatron.training.optimizer_shards import parts_of

Part: TypeAlias = Literal["policy", "head"]


@frozen(kw_only=True, eq=False)
class HeadGradients:
    """The optimizer's gradients in two parts; called on every rank."""

    optimizer: MegatronOptimizer
    head: frozenset[int]
    """Identities of what the optimizer updates of the head; on stages without a head, and where the model has none, empty."""

    @classmethod
    def of(cls, models: Sequence[Any], optimizer: MegatronOptimizer) -> "HeadGradients":
        """The gradients of these model chunks, by the optimizer that `make_optimizer` has made for them."""
        named = [pair for model in unwrapped(models) for pair in model.named_parameters()]
        of_head = {id(parameter) for name, parameter in named if name.startswith(MULTI_TOKEN_HEAD)}
        keys = [
            part.optimizer.param_groups[group]["params"][order]
            for part in (parts_of(optimizer) if of_head else ())
            for parameter, (group, order) in part.model_param_group_index_map.items()
            if id(parameter) in of_head
        ]
        return cls(optimizer=optimizer, head=frozenset(map(id, keys)))

    def norm(self, part: Part) -> float:
        """The L2 norm of one part's gradients over all ranks."""
        with self._only(part):
            return float(self.optimizer.get_grad_norm())

    def clip(self, part: Part, norm: float, limit: float) -> None:
        """Scale one part's gradients, whose norm this is, to at most `limit`."""
        with self._only(part):
            clip(self.optimizer, norm, limit)

    @contextmanager
    def _only(self, part: Part) -> Iterator[None]:
        """Hide the other part's gradients."""
        name = "decoupled_grad" if self.optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        updated = [key for group in self.optimizer.param_groups for key in group["params"]]
        hidden = [(key, getattr(key, name, None)) for key in updated if (id(key) in self.head) != (part == "head")]
        hidden = [(key, gradient) for key, gradient in hidden if gradient is not None]
        for key, _ in hidden:
            setattr(key, name, None)
        try:
            yield
        finally:
            for key, gradient in hidden:
                setattr(key, name, gradient)
