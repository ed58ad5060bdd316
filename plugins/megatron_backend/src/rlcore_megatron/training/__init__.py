"""A step of training: passes of the microbatches, the optimizer and its state, memory that sleeps."""
