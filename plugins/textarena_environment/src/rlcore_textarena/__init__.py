"""An environment for rlcore: two-player games of TextArena."""
