"""Recipes of other libraries, turned into rlcore's."""
