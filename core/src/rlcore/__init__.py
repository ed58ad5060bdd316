"""rlcore: reinforcement-learning post-training of language models on any backend.

Importing this package imports no torch, no transformers and no ray; what a plugin needs is in :mod:`rlcore.spi`.
"""

__version__ = "0.1.0"
