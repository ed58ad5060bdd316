"""Weights between Hugging Face's tensors and Megatron's parameters: loading, export, shards, adapters."""
