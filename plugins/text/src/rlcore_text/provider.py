"""The descriptions of the tokenizers and the renderer, which import neither transformers nor numpy."""

from rlcore.spi import SPI_VERSION, TextProvider

TRANSFORMERS = TextProvider(name="transformers", spi=SPI_VERSION, priority=50, backend="rlcore_text.backends:tokenizers")
"""Tokenizers of model directories and of the Hugging Face Hub."""
JINJA_TEMPLATES = TextProvider(name="jinja_templates", spi=SPI_VERSION, priority=50, backend="rlcore_text.backends:renderer")
"""Rows and chats through a tokenizer's chat template."""
