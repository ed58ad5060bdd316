"""The engine of a replay: it answers each request with the tokens that the bundle holds."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import define, field, frozen

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import EPISODE_IDS, GENERATION_LOGPROBS, WEIGHT_VERSIONS, FinishReason, GenerateRequest, GenerateResult
from rlcore.spi.arrays import Float32Array, Int32Array, offsets_of
from rlcore.spi.execution import ResponseFeed, Responses, TextDecoder


@frozen(kw_only=True, eq=False)
class Answer:
    """One recorded turn of the policy."""

    prompt: Int32Array
    """int32 [length]: the tokens before it."""
    tokens: Int32Array
    """int32 [T]"""
    logprobs: Float32Array
    """float32 [T]"""
    versions: Int32Array
    """int32 [T]"""
    finish_reason: FinishReason | None
    """None of a turn before the last one, of which the bundle holds none."""


@define(kw_only=True, eq=False)
class EpisodeAnswers:
    """The answers of one episode, in order. Each is given once."""

    left: list[Answer]
    num_beyond: int = 0
    """Requests behind the last answer."""

    def take(self, prompt: Int32Array) -> Answer | None:
        """The answer to a prompt: that of the same tokens, else the next one; None where none is left."""
        same = next((number for number, one in enumerate(self.left) if np.array_equal(one.prompt, prompt)), 0)
        if self.left:
            return self.left.pop(same)
        self.num_beyond += 1
        return None


@define(kw_only=True, eq=False)
class RecordedAnswers:
    """A GeneratorGroup of recorded answers. A request behind an episode's last answer gets one without tokens."""

    episodes: list[EpisodeAnswers]
    decoder: TextDecoder
    stop_token_ids: frozenset[int]
    weight_version: int
    episode_of: dict[int, int] = field(factory=dict)
    """The episode of each conversation that is numbered otherwise, such as an agent's session."""

    is_usable = True

    def has(self, capability: str) -> bool:  # noqa: ARG002 - each option of sampling is in the answers
        """See BackendGroup."""
        return True

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:  # noqa: ARG002 - the answers have theirs
        """See GeneratorGroup."""
        first = 0
        while (requests := feed.take(wait=True)) is not None:
            for request in requests:
                result = self._result(request)
                number = len(result.finish_reasons)
                feed.deliver(np.arange(first, first + number, dtype=np.int64), Responses.of(result, self.decoder))
                first += number

    def _result(self, request: GenerateRequest) -> GenerateResult:
        assert request.conversations is not None, "episodes number their requests"
        bounds = request.prompts.offsets.tolist()
        prompts = [request.prompts.tokens[start:end] for start, end in pairwise(bounds) for _ in range(request.num_samples)]
        limits, numbers = request.max_tokens.tolist(), request.conversations.tolist()
        given = [
            self.episodes[self.episode_of.get(number, number)].take(prompt) or self._nothing(prompt)
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        return GenerateResult(
            tokens=np.concatenate([one.tokens for one in given]),
            offsets=offsets_of([len(one.tokens) for one in given]),
            logprobs=np.concatenate([one.logprobs for one in given]),
            weight_versions=np.concatenate([one.versions for one in given]),
            finish_reasons=np.array([self._reason(one, most) for one, most in zip(given, limits, strict=True)], np.uint8),
        )

    def _nothing(self, prompt: Int32Array) -> Answer:
        none = np.zeros(0, np.int32)
        return Answer(
            prompt=prompt, tokens=none, logprobs=np.zeros(0, np.float32), versions=none, finish_reason=FinishReason.STOP
        )

    def _reason(self, answer: Answer, most: int) -> FinishReason:
        """The recorded reason; of an earlier turn, and of an episode that was given up, what its length says."""
        if answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            return answer.finish_reason
        is_full = len(answer.tokens) >= most and int(answer.tokens[-1]) not in self.stop_token_ids
        return FinishReason.LENGTH if is_full else FinishReason.STOP


def answers_of(sampled: CollectedRollouts, num_episodes: int) -> list[EpisodeAnswers]:
    """The answers of each episode of a step's samples: of one sequence, or of those of `episode_ids`."""
    batch = sampled.batch
    owners = batch.sequence_columns.get(EPISODE_IDS, np.arange(batch.num_sequences))
    found = [EpisodeAnswers(left=[]) for _ in range(num_episodes)]
    for sequence, owner in enumerate(owners.tolist()):
        found[owner].left += _answers(sampled, sequence)
    return found


def _answers(sampled: CollectedRollouts, sequence: int) -> Iterator[Answer]:
    """Yield the turns of a sequence."""
    batch = sampled.batch
    part = slice(int(batch.offsets[sequence]), int(batch.offsets[sequence + 1]))
    columns: dict[str, Any] = {name: column[part] for name, column in batch.token_columns.items()}
    tokens, versions = batch.tokens[part], columns[WEIGHT_VERSIONS]
    spans = list(_spans(sampled, sequence, part, versions))
    for number, (start, end) in enumerate(spans, start=1):
        yield Answer(
            prompt=tokens[:start],
            tokens=tokens[start:end],
            logprobs=columns[GENERATION_LOGPROBS][start:end],
            versions=versions[start:end],
            finish_reason=FinishReason(int(sampled.finish_reasons[sequence])) if number == len(spans) else None,
        )


def _spans(sampled: CollectedRollouts, sequence: int, part: slice, versions: Int32Array) -> Iterator[tuple[int, int]]:
    """Yield the first and the end place of each turn: by the numbers of turns where the batch has them, else by what was
    generated. A turn may be empty, but not in an episode of several sequences."""
    if sampled.turns is None:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], versions >= 0, [False]]).astype(np.int8))).tolist()
        yield from zip(edges[::2], edges[1::2], strict=True)
        return
    turn_of, episodes = sampled.turns.turn_of[part], sampled.episode_of
    episode = int(episodes[sequence])
    first, last = sampled.turns.offsets[episode : episode + 2].tolist()
    numbers: Sequence[int] = range(last - first)
    if sampled.turns.continues is not None:  # the parts of a turn are one answer
        begins = ~sampled.turns.continues[first:last]
        numbers = range(np.count_nonzero(begins))
        turn_of = np.append(np.cumsum(begins) - 1, -1)[turn_of]  # the place -1, of tokens that were read, is the last
    if np.count_nonzero(episodes == episode) > 1:
        numbers = [number for number in numbers if number in turn_of]
    end = 0
    for turn in numbers:
        places = np.flatnonzero(turn_of == turn)
        start, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (end, end)
        yield start, end
