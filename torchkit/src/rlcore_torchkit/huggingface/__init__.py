"""Hugging Face models: checking, loading, reading and writing their directories."""
