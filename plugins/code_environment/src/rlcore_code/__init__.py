"""An environment for rlcore: Python programs against tests."""
