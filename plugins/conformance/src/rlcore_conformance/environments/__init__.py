"""Fixtures of environments, and episodes with calls of tools."""
