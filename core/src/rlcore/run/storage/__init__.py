"""Files of a run: its directory, checkpoints, recipes, what a resumed run finds."""
