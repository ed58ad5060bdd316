"""Files of a run: its directory, checkpoints, rollouts, metrics."""
