"""Families of models in Megatron: of which of Hugging Face's tensors each parameter is made. None imports torch."""
