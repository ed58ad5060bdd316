"""The pluggy markers of the project."""

import pluggy

PROJECT = "rlcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a backend's hooks, and with `wrapper=True` an observer's."""
