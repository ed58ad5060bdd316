"""Prepares the data of an update, and checks that trainer and generator agree on it."""
