"""Parallel layouts: their sizes, memory, time and process groups."""
