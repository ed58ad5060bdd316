"""Checkpoints in Megatron's distributed format, and copies of Hugging Face models in it."""
