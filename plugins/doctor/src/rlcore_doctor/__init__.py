"""rlcore-doctor: what is installed, what does not fit together, and the command that mends it."""
