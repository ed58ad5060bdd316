"""Checks of trainers, one module a capability."""
