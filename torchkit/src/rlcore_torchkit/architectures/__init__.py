"""Families of models, a file each: what trainers and generators have to know of one. Importing these files imports no torch."""
