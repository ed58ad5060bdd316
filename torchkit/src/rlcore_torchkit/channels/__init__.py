"""Refit channels for torch tensors; the descriptions are in `providers`, which imports no torch."""
