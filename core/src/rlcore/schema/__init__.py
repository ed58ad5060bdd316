"""Types and values of a configuration, their ranges and their words, and what is wrong with them. Imports nothing of rlcore."""
