"""Trainer and generator `mlx`, in Apple's MLX and without torch."""
