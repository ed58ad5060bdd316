"""Rows of data sets: read from any source, and rendered to tokens."""
