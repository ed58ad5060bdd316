"""Re-exports save_state, a trainer's hook that writes a checkpoint."""

from rlcore_torchkit.trainer.trainer_hooks import save_state

__all__ = ["save_state"]
