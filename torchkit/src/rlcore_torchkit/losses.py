"""An algorithm's loss over microbatches, at the path that plugins import."""

from rlcore_torchkit.trainer.losses import evaluate, total

__all__ = ["evaluate", "total"]
