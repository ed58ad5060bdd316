"""Grammars of JSON schemas, which say at each token of a sample what may come next.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcore.spi import ContractError
from rlcore.spi.arrays import BoolArray
from rlcore_torchkit.json_schema import guided_schema


class SchemaMatcher:
    """One sample's place in the grammar of its schema."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """`matcher` is llguidance's."""
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> BoolArray:
        """Return bool [V]: which tokens may come next. Once the text is complete these are stop tokens alone."""
        found: BoolArray = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)[: self._vocab_size] != 0
        return found

    def take(self, token: int) -> None:
        """Take the next token, one of those allowed."""
        self._matcher.consume_token(token)


class SchemaVocabulary:
    """A vocabulary as llguidance reads it, with the tokens that may follow a complete text."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """`tokenizer` is one of the package tokenizers. ContractError without stop tokens, as nothing could end a sample."""
        from llguidance import LLTokenizer

        if not stop_token_ids:
            raise ContractError("generate: found a JSON Schema without stop tokens; expected at least one")
        num_tokens = max(vocab_size, tokenizer.get_vocab_size())
        self._tokens = LLTokenizer(tokenizer.to_str(), n_vocab=num_tokens, eos_token=sorted(set(stop_token_ids)))
        self._vocab_size = vocab_size

    def begin(self, schema: str) -> SchemaMatcher:
        """Return the matcher of a sample without tokens. DataError as `guided_schema` raises it."""
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(guided_schema(schema))
        return SchemaMatcher(LLMatcher(self._tokens, grammar, log_level=0), self._vocab_size)
