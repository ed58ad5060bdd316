"""Repeats a run whose generation ran ahead of training, as its schedule.jsonl has it."""
