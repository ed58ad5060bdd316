"""The interface of what computes a model's hidden states and logits for the engine."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from rlcore_transformers.attention import Attend


class Decoder(Protocol):
    """The forward pass of one model over rows of tokens, on weights that it does not own.

    Shapes: R rows (one token each), H hidden, V vocabulary.
    """

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def routing_shape(self) -> tuple[int, int]:
        """Layers, and experts of a token in each of them."""

    @property
    def needs_equal_lengths(self) -> bool:
        """True where prompts that are computed together have to be of one length, since layers have states."""

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors, by their Hugging Face names, from now on; ModelError where it cannot."""

    def unbind(self) -> None:
        """Let go of the weights."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, routed: Tensor | None = None) -> Tensor:
        """Final hidden states [R, H] of tokens int64 [R] at positions int64 [R].

        `routed` int16 [R, layers, experts of a token], where given, gets the experts of each token in layers that have some.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in the weights' dtype, from final hidden states [R, H]."""
