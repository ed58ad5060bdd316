"""Loads tokenizers for a run: an `rlcore.run.data.text.Tokenizers`."""

from rlcore_text.tokenizers.hub_reach import is_here as is_here
from rlcore_text.tokenizers.tokenizer import load_tokenizer as load_tokenizer
