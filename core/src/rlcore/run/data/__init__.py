"""Rows, prompts and demonstrations, in text and in tokens; every random order follows from the run's seed."""
