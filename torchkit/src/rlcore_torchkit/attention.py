"""Attention over packed sequences, at the path that plugins import."""

from rlcore_torchkit.layers.attention import PackedSequences, packed_forward

__all__ = ["PackedSequences", "packed_forward"]
