"""Re-exports move, which copies a microbatch to its device."""

from rlcore_torchkit.trainer.microbatch import move

__all__ = ["move"]
