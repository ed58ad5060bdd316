"""JSON schemas that samples fulfil, by llguidance, which comes with vLLM and with the extra `structured-output`."""

import json

from rlcore.installed import is_installed
from rlcore.spi import DataError, capabilities

STRUCTURED_OUTPUT = frozenset({capabilities.STRUCTURED_OUTPUT} if is_installed("llguidance") else ())
"""The capability of a generator that uses this module; empty where llguidance is not installed."""
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""llguidance's options: JSON on one line, as json.dumps writes it, or without spaces. A model that may write any whitespace can
fill its sample with it."""


def guided_schema(schema: str) -> str:
    """Return a JSON Schema with llguidance's options. DataError where no text fulfils it, where it is no schema, and where it
    has keywords that llguidance does not enforce."""
    from llguidance import LLMatcher

    try:
        found = json.loads(schema)
    except ValueError as error:
        raise DataError(f"found a JSON Schema that is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"found {schema:.60}; expected a JSON Schema that is an object")
    guided = json.dumps({**found, "x-guidance": OPTIONS})
    fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(guided))
    if fault:
        raise DataError(f"found a JSON Schema that samples cannot be held to: {' '.join(fault.split()):.300}")
    return guided
