"""The run: set-up, the loop, evaluation, checkpoints, and what a run directory holds."""
