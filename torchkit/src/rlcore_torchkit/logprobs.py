"""Log-probabilities without a full logits tensor, at the path that plugins import."""

from rlcore_torchkit.head.logprobs import packed_logprobs, patch_head

__all__ = ["packed_logprobs", "patch_head"]
