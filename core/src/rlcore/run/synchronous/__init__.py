"""A run of the inner ring alone: whole batches, one after another, in this process."""
