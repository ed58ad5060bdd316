"""The beginnings of a step's episodes: rows that the environment has made prompts of, those over the limit left out."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from rlcore.run.data.prompts import encode_prompts
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.rollout.episode_failure import Failure
from rlcore.spi import DataError, Observation, RaggedTokens, ResetResult, Row
from rlcore.spi.arrays import Int64Array


@frozen(kw_only=True, eq=False)
class PromptLimit:
    """How long a prompt may be that only its episode's beginning shows."""

    max_tokens: int
    drops: bool
    """Whether longer ones are left out; else they are an error."""
    key: str
    """The data set's section of the recipe."""


@frozen(kw_only=True, eq=False)
class EpisodeStarts:
    """P episodes' beginnings, one a row."""

    rows: Sequence[Row]
    resets: Sequence[ResetResult | Failure]
    """The reset of each of the P prompts."""
    prompts: RaggedTokens
    """P prompts; of an episode that failed, one token in place of it."""
    kept: Int64Array
    """int64 [P]: their numbers among the rows that were asked for."""
    num_dropped: int
    """Rows left out since their prompts are over the limit."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        resets: Sequence[ResetResult | Failure],
        tokenizer: Tokenizer,
        limit: PromptLimit,
        placeholder: int,
    ) -> "EpisodeStarts":
        """DataError where a prompt is over the limit and that is an error, or all of them are. `placeholder` is the token that
        stands for the prompt of an episode which failed: a generator needs some."""
        failed = Observation(tokens=np.asarray([placeholder], np.int32))
        observations = [failed if isinstance(reset, Failure) else reset.observation for reset in resets]
        encoded = encode_prompts(observations, tokenizer)
        kept = [index for index, tokens in enumerate(encoded) if len(tokens) <= limit.max_tokens]
        if len(kept) < len(rows) and not (limit.drops and kept):
            raise _too_long(rows, [len(tokens) for tokens in encoded], limit)
        return cls(
            rows=[rows[index] for index in kept],
            resets=[resets[index] for index in kept],
            prompts=RaggedTokens.from_lists([encoded[index] for index in kept]),
            kept=np.asarray(kept, np.int64),
            num_dropped=len(rows) - len(kept),
        )


def _too_long(rows: Sequence[Row], lengths: Sequence[int], limit: PromptLimit) -> DataError:
    longest = int(np.argmax(lengths))
    found = (
        f"the environment's prompt for row {rows[longest]!r:.200} has {lengths[longest]} tokens; expected at most "
        f"{limit.max_tokens} (rollout.max_prompt_tokens)"
    )
    if limit.drops:
        return DataError(f"{limit.key}: all {len(rows)} prompts asked for are over the limit: {found}")
    return DataError(f'{limit.key}: {found}. Raise it, or leave such rows out with {limit.key}.on_long_prompt = "drop"')
