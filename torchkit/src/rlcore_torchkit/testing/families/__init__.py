"""Tiny random models of any family of decoders, with their log-probabilities by transformers, and trials in child processes."""
