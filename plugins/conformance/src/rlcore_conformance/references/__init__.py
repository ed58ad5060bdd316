"""Reference models and losses that plugins are compared with, and the fixtures that all roles share."""
