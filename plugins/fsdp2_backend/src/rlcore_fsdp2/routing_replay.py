"""Routers that send tokens to the experts that the generator sent them to."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from rlcore.spi import ROUTED_EXPERTS
from rlcore_torchkit.architectures.decoders import described_family
from rlcore_torchkit.forward.context_parallel import ContextPart
from rlcore_torchkit.layers.routing_replay import ReplayedChoice, RoutingReplay
from rlcore_torchkit.trainer.microbatch import Microbatch


@frozen(eq=False)
class ModelReplay(RoutingReplay):
    """The choices of a model's layers, by number; those of layers without experts are asked by nobody."""

    group: dist.ProcessGroup | None
    """The ranks that share a microbatch's tokens."""

    def use(self, batch: Microbatch) -> None:
        """Let a microbatch decide, until the next one: its layers may compute again in the backward pass."""
        routed = batch.token_columns.get(ROUTED_EXPERTS)
        if routed is not None:
            routed = routed.permute(1, 2, 0)
            if self.group is not None:
                routed = ContextPart.of(batch.packed, self.group).split(routed + 1) - 1
        for layer, choice in enumerate(self.choices):
            choice.targets = None if routed is None else routed[layer].t().long()


def attach(model: Any, group: dist.ProcessGroup | None) -> ModelReplay:
    """Have the routers of a transformers causal language model ask for their choice."""
    family = described_family(model.config.to_dict())
    if family is None:  # `check` refuses to replay the routing of one that no family describes
        return ModelReplay([], group)
    modules = family.modules
    layers = modules.layers_of(model)
    choices = [ReplayedChoice() for _ in layers]
    for layer, choice in zip(layers, choices, strict=True):
        if modules.experts_of(layer) is not None:
            layer.get_submodule(modules.router).register_forward_hook(partial(_replay, choice))
    return ModelReplay(choices, group)


def _replay(choice: ReplayedChoice, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
    """The router's logits [S, E], weights and experts [S, K] each, with the experts that are given."""
    logits, _, own = output
    if choice.targets is None:
        return None
    # Tensor ranks compute the padding too, behind the tokens.
    choice.targets = F.pad(choice.targets, (0, 0, 0, len(own) - len(choice.targets)), value=-1)
    chosen = choice.choose(own)
    weights = logits.softmax(-1, torch.float32).gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen
