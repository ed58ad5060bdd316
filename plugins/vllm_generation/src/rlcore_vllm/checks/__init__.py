"""Errors of a recipe found before anything is allocated, and the estimates of `rlcore plan`."""
