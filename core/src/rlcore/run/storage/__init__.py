"""What a run keeps on disk: its directory, checkpoints, rollouts, metrics."""
