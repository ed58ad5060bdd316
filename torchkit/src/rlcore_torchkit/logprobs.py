"""Re-exports packed_logprobs and patch_head: log-probabilities without a full logits tensor."""

from rlcore_torchkit.head.logprobs import packed_logprobs, patch_head

__all__ = ["packed_logprobs", "patch_head"]
