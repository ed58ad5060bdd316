"""Re-exports PackedSequences and packed_forward: attention over packed sequences."""

from rlcore_torchkit.head.logprobs import packed_forward
from rlcore_torchkit.layers.attention import PackedSequences

__all__ = ["PackedSequences", "packed_forward"]
