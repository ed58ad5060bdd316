"""An environment for rlcore: drawn circles and squares to be counted."""
