"""Engines as the generator uses them: in this process or in child processes, with requests divided among them."""
