"""Counting the tokens that are guessed, and those of them that the model accepts."""

from typing import Any

from rlcore.spi import DraftCounts


class DraftCounter:
    """Counts the guesses that vLLM's scheduler judges, before the SpecDecodingStats that vLLM keeps for its own metrics."""

    def __init__(self, scheduler: Any) -> None:
        self._found = DraftCounts()
        self._own = scheduler.make_spec_decoding_stats
        scheduler.make_spec_decoding_stats = self._observe

    def take(self) -> DraftCounts:
        """Return the counts since the last time."""
        found, self._found = self._found, DraftCounts()
        return found

    def _observe(self, stats: Any, *, num_draft_tokens: int, num_accepted_tokens: int, **others: Any) -> Any:
        if num_draft_tokens:
            self._found += DraftCounts(num_drafts=1, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens)
        return self._own(stats, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **others)
