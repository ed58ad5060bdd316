"""Re-exports load_model and architecture_problems for Hugging Face models; imports no torch by itself."""

from rlcore_torchkit.huggingface.models import architecture_problems, load_model

__all__ = ["architecture_problems", "load_model"]
