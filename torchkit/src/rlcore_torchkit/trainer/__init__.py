"""Parts of a trainer: microbatches, losses, hooks, statistics of a step, and estimates of its time."""
