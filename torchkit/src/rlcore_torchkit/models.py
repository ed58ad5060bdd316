"""Hugging Face models, at the path that plugins import; imports no torch by itself."""

from rlcore_torchkit.huggingface.models import architecture_problems, load_model

__all__ = ["architecture_problems", "load_model"]
