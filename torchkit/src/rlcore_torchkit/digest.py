"""Digests of tensors, at the path that plugins import."""

from rlcore_torchkit.refit.digest import tensor_digest

__all__ = ["tensor_digest"]
