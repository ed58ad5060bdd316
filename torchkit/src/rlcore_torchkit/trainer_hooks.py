"""Parts of trainers' hooks, at the path that plugins import."""

from rlcore_torchkit.trainer.trainer_hooks import save_state

__all__ = ["save_state"]
