"""A router with bias-corrected scores: the bias decides the choice of experts, not their weights (arXiv:2408.15664)."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from rlcore_megatron.modules.auxiliary_loss import PolicyRouter


class BiasCorrectedRouter(PolicyRouter):
    """Megatron's own bias is a buffer that it moves in every step. This one is float32 [experts], a parameter of the model like
    others but for gradients, and stays as it is read: a model's answers must not depend on the batches of its past."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        zeros = torch.zeros(self.num_experts, dtype=torch.float32, device=self.weight.device)
        self.expert_bias = nn.Parameter(zeros, requires_grad=False)
