"""Trainer and generator as the loop sees them, in this process or on Ray, and the weights' way between them."""
