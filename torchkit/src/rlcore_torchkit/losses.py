"""Re-exports evaluate and total, which compute an algorithm's loss over microbatches."""

from rlcore_torchkit.trainer.losses import evaluate, total

__all__ = ["evaluate", "total"]
