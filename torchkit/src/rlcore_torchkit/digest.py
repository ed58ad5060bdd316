"""Re-exports tensor_digest, the digest of a tensor's bytes."""

from rlcore_torchkit.refit.digest import tensor_digest

__all__ = ["tensor_digest"]
