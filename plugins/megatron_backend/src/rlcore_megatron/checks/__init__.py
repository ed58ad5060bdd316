"""Errors of a recipe found before anything is allocated."""
