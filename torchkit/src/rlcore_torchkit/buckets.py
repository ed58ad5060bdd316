"""Weights cut into buckets, at the path that plugins import."""

from rlcore_torchkit.refit.digest import make_buckets

__all__ = ["make_buckets"]
