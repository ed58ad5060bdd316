"""The norm of layers that are not TransformerEngine's."""

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class PlainRMSNorm(nn.RMSNorm):
    """weight · x / √(mean x² + ε) over the last dimension, in the form that Megatron builds norms.

    Its own wrapper of torch's refuses sequence parallelism, whose gradients only need the mark that is set here.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
