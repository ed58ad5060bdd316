"""Recipes: TOML to frozen classes, strictly, with every problem reported at once."""
