"""An environment for rlcore: the problem families of reasoning-gym."""
