"""Checks of generators, one module a capability."""
