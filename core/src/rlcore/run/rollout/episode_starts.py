"""The beginnings of a step's episodes: rows that the environment has made prompts of, those over the limit left out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from attrs import frozen

from rlcore.run.data.prompts import encode_prompts
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.rollout.episode_failure import Failure
from rlcore.spi import DataError, Observation, RaggedTokens, ResetResult, Row
from rlcore.spi.arrays import Int64Array

Reset: TypeAlias = Callable[[Mapping[int, Row]], Sequence[ResetResult | Failure]]
"""Begins an episode on each row; each has the place that it takes among the rows of the step."""


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
    places: Int64Array
    """int64 [P]: their numbers among the rows that were asked for, or which they replace; ascending."""
    num_long: int
    """Rows left out since their prompts are over the limit."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        spare: Iterable[Row],
        reset: Reset,
        tokenizer: Tokenizer,
        limit: PromptLimit,
        placeholder: int,
    ) -> "EpisodeStarts":
        """A row whose prompt is over the limit is replaced by the next of `spare`, and left out where none is left.

        DataError where a prompt is over the limit and that is an error, or all of them are. `placeholder` is the token that
        stands for the prompt of an episode which failed: a generator needs some."""
        failed = Observation(tokens=np.asarray([placeholder], np.int32))
        begun: dict[int, tuple[Row, ResetResult | Failure, Sequence[int]]] = {}
        spares, todo, num_long = iter(spare), dict(enumerate(rows)), 0
        while todo:
            resets = reset(todo)
            observations = [failed if isinstance(result, Failure) else result.observation for result in resets]
            encoded = encode_prompts(observations, tokenizer)
            over = []
            for (place, row), result, tokens in zip(todo.items(), resets, encoded, strict=True):
                if len(tokens) > limit.max_tokens:
                    over.append(place)
                else:
                    begun[place] = (row, result, tokens)
            num_long += len(over)
            replaced = dict(zip(over, spares, strict=False))
            if over and not (limit.drops and (begun or replaced)):
                raise _too_long(list(todo.values()), [len(tokens) for tokens in encoded], limit, num_long)
            todo = replaced
        places = sorted(begun)
        return cls(
            rows=[begun[place][0] for place in places],
            resets=[begun[place][1] for place in places],
            prompts=RaggedTokens.from_lists([begun[place][2] for place in places]),
            places=np.asarray(places, np.int64),
            num_long=num_long,
        )


def _too_long(rows: Sequence[Row], lengths: Sequence[int], limit: PromptLimit, num_long: int) -> DataError:
    longest = int(np.argmax(lengths))
    found = (
        f"the environment's prompt for row {rows[longest]!r:.200} has {lengths[longest]} tokens; expected at most "
        f"{limit.max_tokens} (rollout.max_prompt_tokens)"
    )
    if limit.drops:
        return DataError(f"{limit.key}: all {num_long} prompts asked for are over the limit: {found}")
    return DataError(f'{limit.key}: {found}. Raise it, or leave such rows out with {limit.key}.on_long_prompt = "drop"')
