"""Tokenizers of Hugging Face models, and their chat templates."""
