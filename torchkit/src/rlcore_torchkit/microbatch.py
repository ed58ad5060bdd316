"""Microbatches on their device, at the path that plugins import."""

from rlcore_torchkit.trainer.microbatch import move

__all__ = ["move"]
