"""Re-exports make_buckets, which divides weights into buckets for a refit."""

from rlcore_torchkit.refit.digest import make_buckets

__all__ = ["make_buckets"]
