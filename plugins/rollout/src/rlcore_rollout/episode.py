"""One episode: what it asks the generator for, what comes of that, and its state. It can be saved and resumed at any moment."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from attrs import define, evolve, field, frozen

from rlcore.spi import (
    EpisodeFailure,
    FinishReason,
    Observation,
    SamplingMask,
    SamplingParams,
    StepResult,
    TokenReader,
    Tool,
    ToolCall,
    Turn,
)
from rlcore.spi.arrays import AnyArray, Float32Array, Int16Array, Int32Array
from rlcore.spi.execution import Responses
from rlcore.thoughts import MARK_TOKENS

Decode: TypeAlias = Callable[[Sequence[int] | Int32Array], str]

NOT_GENERATED = -1
"""The weight version of a token that the policy did not say."""
NO_TOKENS = np.zeros(0, np.int32)
_NOTHING: Mapping[str, float] = {}
"""Shared, and never changed."""
_REASONS = {int(reason): reason for reason in FinishReason}
_NO_TOKENS_LEFT = EpisodeFailure(kind="limit", reason="no token was left (rollout.max_response_tokens)")
_NO_TURN_LEFT = EpisodeFailure(kind="limit", reason="no turn was left, or no room for what came next (rollout.max_turns)")
_TURN_CUT = EpisodeFailure(kind="limit", reason="its last turn was cut off")


# Not frozen, as nothing is of which one is made for each turn: that more than doubles the time that it takes.
@define(kw_only=True, eq=False)
class CompletionRequest:
    """One sample that is asked for."""

    prompt: Int32Array
    """int32 [length]: all that it sees. Samples of one array, asked for one after another, share a prompt."""
    seed: int
    max_tokens: int
    sampling: SamplingParams
    owner: object
    """Whose sample it is."""
    routed_experts: bool = False
    sampling_mask: bool = False
    goes_on: bool = False
    """True where its episode has said something before."""
    conversation: int = -1
    """GenerateRequest.conversations of it."""
    images: tuple[bytes, ...] = ()
    """The prompt's images; the same of all samples that share one."""
    reader: TokenReader | None = None
    """GenerateRequest.readers of it."""


@define(kw_only=True, eq=False)
class Completion:
    """The result of a sample request."""

    request: CompletionRequest
    text: str
    tokens: Int32Array
    """int32 [T]"""
    logprobs: Float32Array
    """float32 [T]"""
    weight_versions: Int32Array
    """int32 [T]"""
    finish_reason: FinishReason
    routed_experts: Int16Array | None = None
    """int16 [prompt and T, L, K]"""
    sampling_mask: SamplingMask | None = None
    """The tokens that each of the T tokens was chosen among."""


def completions_of(wanted: Sequence[CompletionRequest], responses: Responses) -> list[Completion]:
    """The completion of each of S samples: views of what the generator returned."""
    result = responses.result
    tokens = result.tokens.view()
    tokens.flags.writeable = False  # environments see them, and they are what will be trained on
    bounds, reasons = result.offsets.tolist(), result.finish_reasons.tolist()
    routed, mask = result.routed_experts, result.sampling_mask
    rows = None if routed is None else routed.offsets.tolist()
    found = []
    for row, one in enumerate(wanted):
        part = slice(bounds[row], bounds[row + 1])
        found.append(
            Completion(
                request=one,
                text=responses.texts[row],
                tokens=tokens[part],
                logprobs=result.logprobs[part],
                weight_versions=result.weight_versions[part],
                finish_reason=_REASONS[reasons[row]],
                routed_experts=None if routed is None or rows is None else routed.experts[rows[row] : rows[row + 1]],
                sampling_mask=None if mask is None else mask.slice(part.start, part.stop),
            )
        )
    return found


def until_stop(begun: Sequence[Int32Array], sampled: Completion, decode: Decode) -> Completion:
    """The rest of a turn up to the first stop string of the whole turn, which a generator that began behind the cut cannot see
    where it lies across it. What it then said after the stop string is left out."""
    stops = sampled.request.sampling.stop_strings
    if not begun or not stops or not len(sampled.tokens):
        return sampled
    before = np.concatenate(begun)

    def has_stopped(number: int) -> bool:
        text = decode(np.concatenate([before, sampled.tokens[:number]]))
        return any(stop in text for stop in stops)

    number = bisect_left(range(len(sampled.tokens) + 1), True, key=has_stopped)
    if number > len(sampled.tokens):
        return sampled
    experts, mask = sampled.routed_experts, sampled.sampling_mask
    left_out = len(sampled.tokens) - number
    return evolve(
        sampled,
        tokens=sampled.tokens[:number],
        logprobs=sampled.logprobs[:number],
        weight_versions=sampled.weight_versions[:number],
        finish_reason=FinishReason.STOP,
        routed_experts=None if experts is None else experts[: len(experts) - left_out],
        sampling_mask=None if mask is None else mask.slice(0, number),
    )


@frozen(kw_only=True, eq=False)
class EndedSegment:
    """A segment that another one follows, since the chat template rewrites what the policy has read or said."""

    end: int
    """The place behind its last token, among the tokens of its episode."""
    text: str
    """The text of its turns."""
    finish_reason: FinishReason
    """Why its last turn ended."""


@define(kw_only=True, eq=False)
class Episode:
    """One of the samples of a group. There are many at once: what most of them have none of, or one piece, is a tuple, which
    costs nothing where it is empty and which Python's search for cycles leaves alone."""

    number: int
    """Its number in the run: that of its group times the size of a group, and its own in the group."""
    state: Any
    """The environment's."""
    budget: int
    """Tokens that may still be said and read."""
    num_read: int = 0
    """Tokens that it has read at the expense of its budget."""
    max_turn_tokens: int | None = None
    """Most tokens of one turn, where the budget is larger."""
    tools: Sequence[Tool] = ()
    """The tools that the policy may call."""
    images: tuple[bytes, ...] = ()
    """The images of its prompt."""
    valid: bool = True
    """False where its environment failed."""
    turn: int = 0
    """The number of the turn that is being said, or answered."""
    partial_turn: Sequence[Int32Array] = ()
    """The tokens of the present turn from before the generator was stopped, in pieces."""
    unanswered_turn: Turn | None = None
    """The turn that its environment is to answer; None while the policy says it."""
    unread_observation: Observation | None = None
    """The policy's input before its next turn, where the environment has answered."""
    ended: bool = False
    rewards: tuple[float, ...] = ()
    """The reward of each turn, with those of its parts; 0.0 where its environment has not answered."""
    parts: tuple[tuple[int, float], ...] = ()
    """The places among its tokens behind which parts of turns end, but for the last of a turn, with their rewards."""
    reward_components: Mapping[str, float] = field(factory=lambda: _NOTHING)
    """The components of the rewards, each summed over its turns."""
    timed_out: bool = False
    failure: EpisodeFailure | None = None
    """The end of the episode, where an environment, an error or the time of an episode says so."""
    success: bool = False
    text: str = ""
    """The text of all the policy's turns."""
    num_generated: int = 0
    stops: tuple[int, ...] = ()
    """The places among its tokens at which a turn went on after the generator was stopped in it."""
    finish_reason: FinishReason = FinishReason.ABORTED
    metrics: tuple[tuple[str, float], ...] = ()
    """The metrics that its environment reported, in order."""
    tokens: tuple[Int32Array, ...] = ()
    """The tokens that it has read and generated, in pieces, of all its segments one after another."""
    logprobs: tuple[Float32Array, ...] = ()
    versions: tuple[Int32Array, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()
    """The first and the end place of each turn among the tokens."""
    length: int = 0
    """Tokens of all its segments."""
    ended_segments: tuple[EndedSegment, ...] = ()
    """The segments before its last one."""
    routed: tuple[tuple[int, AnyArray], ...] = ()
    """For each turn the place at which its segment begins, and the experts of the tokens from there on, where they are
    wanted."""
    masks: tuple[tuple[int, SamplingMask], ...] = ()
    """The place of each generated piece, and the tokens that its tokens were chosen among; empty where the run does not need
    them."""

    @property
    def num_partial_tokens(self) -> int:
        """Tokens of the present turn that were said before the generator was stopped."""
        return sum(map(len, self.partial_turn))

    @property
    def turn_budget(self) -> int:
        """Most tokens of the next turn, or of the rest of the present one."""
        return self.budget if self.max_turn_tokens is None else min(self.budget, self.max_turn_tokens - self.num_partial_tokens)

    @property
    def truncated(self) -> bool:
        """Return whether a limit of tokens or turns cut it off: its last turn, or what was to come after that."""
        would_go_on = self.unread_observation is not None or (self.failure is not None and self.failure.kind == "limit")
        return self.finish_reason is not FinishReason.STOP or (self.valid and would_go_on)

    @property
    def ending(self) -> EpisodeFailure | None:
        """Return how it ended, once it has; None where by the policy."""
        if self.failure is not None or not self.truncated:
            return self.failure
        if self.budget <= 0:
            return _NO_TOKENS_LEFT
        return _NO_TURN_LEFT if self.finish_reason is FinishReason.STOP else _TURN_CUT

    @property
    def given_budget(self) -> int:
        """The budget that it began with."""
        return self.budget + self.num_generated + self.num_read

    def read(self, tokens: Int32Array) -> None:
        """Append what the environment shows."""
        self._append(tokens, *not_generated(len(tokens)))

    def add_partial_turn(self, sampled: Completion) -> None:
        """Append what of a turn was said before the generator was stopped."""
        if len(sampled.tokens):
            self._take(sampled)
            self.partial_turn = (*self.partial_turn, sampled.tokens)
            self.stops += (self.length,)

    def before_turn(self) -> Int32Array:
        """int32 [length]: the last tokens in front of the present turn, among which the mark of a thought is."""
        end = self.length - self.num_partial_tokens
        return self.all_tokens()[max(end - MARK_TOKENS, self.segment_start) : end]

    def add_turn(
        self,
        sampled: Completion,
        text: str,
        content: str | None = None,
        tool_calls: Sequence[ToolCall] = (),
        *,
        begins_in_thought: bool = False,
    ) -> None:
        """Append a turn of the policy, or the rest of it; `text` is the whole turn's, and `content` is it without the calls."""
        self._take(sampled)
        self.finish_reason = sampled.finish_reason
        self.text += text
        tokens = sampled.tokens
        if self.partial_turn:
            tokens, self.partial_turn = np.concatenate([*self.partial_turn, tokens]), ()
        if tokens.flags.writeable:  # they are what will be trained on, whatever an environment does with its turn
            tokens = tokens.view()
            tokens.flags.writeable = False
        self.turns += ((self.length - len(tokens), self.length),)
        self.rewards += (0.0,)
        self.unanswered_turn = Turn(
            text=text,
            tokens=tokens,
            finish_reason=sampled.finish_reason,
            content=text if content is None else content,
            tool_calls=tool_calls,
            begins_in_thought=begins_in_thought,
        )

    def score(self, answer: StepResult, decode: Decode) -> None:
        """Take the environment's answer to the turn that was said; `decode` gives a turn's text."""
        if answer.part_rewards and self.unanswered_turn is not None:
            self.parts += self._parts_of(self.unanswered_turn, answer.part_rewards, decode)
        self.unanswered_turn = None
        self.unread_observation = answer.observation
        self.state = answer.state
        earned_by_turn = float(answer.reward) + sum(map(float, answer.part_rewards.values()))
        self.rewards = (*self.rewards[:-1], self.rewards[-1] + earned_by_turn)
        if answer.reward_components:
            before = self.reward_components
            earned = {name: before.get(name, 0.0) + float(value) for name, value in answer.reward_components.items()}
            self.reward_components = {**before, **earned} if before else earned
        self.success = answer.success
        self.failure = answer.failure
        self.metrics += tuple(answer.metrics.items())

    def _parts_of(self, turn: Turn, rewards: Mapping[int, float], decode: Decode) -> tuple[tuple[int, float], ...]:
        """The place behind the token with which each part's text is complete, and its reward; the rest of the turn, which earns
        its own reward, has at least one token."""
        start, end = self.turns[-1]
        tokens = turn.tokens.tolist()
        earned: dict[int, float] = {}
        for characters, reward in sorted(rewards.items()):
            num_tokens = bisect_left(range(len(tokens)), characters, key=lambda number: len(decode(tokens[: number + 1]))) + 1
            if start + num_tokens < end:
                earned[start + num_tokens] = earned.get(start + num_tokens, 0.0) + float(reward)
        return tuple(earned.items())

    def rewarded_parts(self) -> Iterator[tuple[int, int, float, bool]]:
        """Yield for each part of each turn its first and end place among the tokens, its reward, and whether it goes on in the
        turn of the one before; a turn without parts is one."""
        parts = iter(self.parts)
        part = next(parts, None)
        for (start, end), reward in zip(self.turns, self.rewards, strict=True):
            first, rest = start, reward
            while part is not None and part[0] < end:
                yield first, part[0], part[1], first > start
                first, rest, part = part[0], rest - part[1], next(parts, None)
            yield first, end, rest, first > start

    def next_turn(self, tokens: Int32Array, *, begins_segment: bool = False) -> None:
        """Read what was shown, and come to the next turn; the end where no token could be said after it. With `begins_segment`
        the tokens are the whole context, of which the budget pays what it is longer than the one before."""
        cost = max(len(tokens) - (self.length - self.segment_start), 0) if begins_segment else len(tokens)
        if cost >= self.budget:
            self.ended = True
            return
        self.unread_observation = None
        self.budget -= cost
        self.num_read += cost
        if begins_segment:
            text = self.segment_texts()[-1]
            self.ended_segments += (EndedSegment(end=self.length, text=text, finish_reason=self.finish_reason),)
        self.read(tokens)
        self.turn += 1

    @property
    def segment_start(self) -> int:
        """The place at which its last segment begins, among all its tokens."""
        return self.ended_segments[-1].end if self.ended_segments else 0

    def context(self) -> Int32Array:
        """int32 [length]: the tokens of its last segment, which the policy sees."""
        tokens, start = self.all_tokens(), self.segment_start
        return tokens[start:] if start else tokens  # samples that share a prompt share one array

    def all_tokens(self) -> Int32Array:
        """int32 [length]: the tokens of all its segments."""
        if len(self.tokens) > 1:
            self.tokens = (np.concatenate(self.tokens),)
        return self.tokens[0] if self.tokens else NO_TOKENS

    def segment_tokens(self) -> list[Int32Array]:
        """The tokens of each segment, int32 [length]."""
        ends = [segment.end for segment in self.ended_segments]
        return [self.all_tokens()[start:end] for start, end in pairwise([0, *ends, self.length])]

    def segment_texts(self) -> list[str]:
        """The text of the turns of each segment."""
        texts = [segment.text for segment in self.ended_segments]
        return [*texts, self.text[sum(map(len, texts)) :]]

    def _take(self, sampled: Completion) -> None:
        if sampled.sampling_mask is not None:
            self.masks += ((self.length, sampled.sampling_mask),)
        if sampled.routed_experts is not None:
            self.routed += ((self.segment_start, sampled.routed_experts),)
        self._append(sampled.tokens, sampled.logprobs, sampled.weight_versions)
        number = len(sampled.tokens)
        self.budget -= number
        self.num_generated += number

    def _append(self, tokens: Int32Array, logprobs: Float32Array, versions: Int32Array) -> None:
        self.tokens += (tokens,)
        self.logprobs += (logprobs,)
        self.versions += (versions,)
        self.length += len(tokens)


@lru_cache(maxsize=64)
def not_generated(number: int) -> tuple[Float32Array, Int32Array]:
    """Log-probabilities and weight versions of so many tokens that the policy did not say, which many episodes share."""
    columns = np.zeros(number, np.float32), np.full(number, NOT_GENERATED, np.int32)
    for column in columns:
        column.flags.writeable = False
    return columns
