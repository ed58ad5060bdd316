"""Attention over packed sequences, at the path that plugins import."""

from rlcore_torchkit.head.logprobs import packed_forward
from rlcore_torchkit.layers.attention import PackedSequences

__all__ = ["PackedSequences", "packed_forward"]
