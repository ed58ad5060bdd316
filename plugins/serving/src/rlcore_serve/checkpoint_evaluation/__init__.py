"""A program of the user's that measures checkpoints, beside the training."""
