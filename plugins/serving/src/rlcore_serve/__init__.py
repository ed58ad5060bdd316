"""rlcore serve: a model, a run or one of its checkpoints behind an API."""
