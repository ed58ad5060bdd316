"""State of one episode: the messages so far, and its next turn. It can be saved and resumed at any moment."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field

from rlcore.run.rollout.group_rewards import Compared, has_reward_variance
from rlcore.run.rollout.request_feed import Completion
from rlcore.spi import FinishReason, Observation, ResetResult, Row, SamplingMask, StepResult, Tool, ToolCall, Turn
from rlcore.spi.arrays import AnyArray, Float32Array, Int32Array

NOT_GENERATED = -1
"""The weight version of a token that the policy did not say."""
_NO_TOKENS = np.zeros(0, np.int32)
_NOTHING: Mapping[str, float] = {}
"""Shared, and never changed."""


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
    max_turn_tokens: int | None = None
    """Most tokens of one turn, where the budget is larger."""
    tools: Sequence[Tool] = ()
    """What the policy may call."""
    images: tuple[bytes, ...] = ()
    """What its prompt shows."""
    valid: bool = True
    """False where its environment failed."""
    turn: int = 0
    """The number of the turn that is being said, or answered."""
    begun: Sequence[Int32Array] = ()
    """What of the present turn was said before the generator was stopped, in pieces."""
    said: Turn | None = None
    """The turn that its environment is to answer; None while the policy says it."""
    shown: Observation | None = None
    """What the policy is to read before its next turn, where the environment has answered."""
    ended: bool = False
    rewards: tuple[float, ...] = ()
    """What each turn earned; 0.0 where its environment has not answered."""
    reward_components: Mapping[str, float] = field(factory=lambda: _NOTHING)
    """What its environment names of the rewards, each summed over its turns."""
    timed_out: bool = False
    success: bool = False
    text: str = ""
    """What the policy said in all its turns."""
    num_generated: int = 0
    cuts: tuple[int, ...] = ()
    """Where among its tokens a turn went on after the generator was stopped in it."""
    finish_reason: FinishReason = FinishReason.ABORTED
    metrics: tuple[tuple[str, float], ...] = ()
    """What its environment reported, in order."""
    tokens: tuple[Int32Array, ...] = ()
    """All that it has read and said, in pieces."""
    logprobs: tuple[Float32Array, ...] = ()
    versions: tuple[Int32Array, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()
    """Where each turn begins and ends among the tokens."""
    length: int = 0
    routed: tuple[AnyArray, ...] = ()
    """The experts of the tokens of each turn, from its first token on, where they are wanted."""
    masks: tuple[tuple[int, SamplingMask], ...] = ()
    """Where that is wanted, what the tokens of each piece that the policy said were chosen among; and where it begins."""

    @property
    def num_begun(self) -> int:
        """Tokens of the present turn that were said before the generator was stopped."""
        return sum(map(len, self.begun))

    @property
    def turn_budget(self) -> int:
        """Most tokens of the next turn, or of the rest of the present one."""
        return self.budget if self.max_turn_tokens is None else min(self.budget, self.max_turn_tokens - self.num_begun)

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens or turns cut it off: its last turn, or what was to come after that."""
        return self.finish_reason is not FinishReason.STOP or (self.valid and self.shown is not None)

    def read(self, tokens: Int32Array) -> None:
        """Append what the environment shows."""
        self._append(tokens, *_not_generated(len(tokens)))

    def begin_turn(self, sampled: Completion) -> None:
        """Append what of a turn was said before the generator was stopped."""
        if len(sampled.tokens):
            self._take(sampled)
            self.begun = (*self.begun, sampled.tokens)
            self.cuts += (self.length,)

    def say(self, sampled: Completion, text: str, content: str | None = None, tool_calls: Sequence[ToolCall] = ()) -> None:
        """Append a turn of the policy, or the rest of it; `text` is the whole turn's, and `content` is it without the calls."""
        self._take(sampled)
        self.finish_reason = sampled.finish_reason
        self.text += text
        tokens = sampled.tokens
        if self.begun:
            tokens, self.begun = np.concatenate([*self.begun, tokens]), ()
        if tokens.flags.writeable:  # they are what will be trained on, whatever an environment does with its turn
            tokens = tokens.view()
            tokens.flags.writeable = False
        self.turns += ((self.length - len(tokens), self.length),)
        self.rewards += (0.0,)
        self.said = Turn(
            text=text,
            tokens=tokens,
            finish_reason=sampled.finish_reason,
            content=text if content is None else content,
            tool_calls=tool_calls,
        )

    def score(self, answer: StepResult) -> None:
        """Take the environment's answer to the turn that was said."""
        self.said = None
        self.shown = answer.observation
        self.state = answer.state
        self.rewards = (*self.rewards[:-1], self.rewards[-1] + float(answer.reward))
        if answer.reward_components:
            before = self.reward_components
            earned = {name: before.get(name, 0.0) + float(value) for name, value in answer.reward_components.items()}
            self.reward_components = {**before, **earned} if before else earned
        self.success = answer.success
        self.metrics += tuple(answer.metrics.items())

    def go_on(self, tokens: Int32Array) -> None:
        """Read what was shown, and come to the next turn; the end where no token could be said after it."""
        if len(tokens) >= self.budget:
            self.ended = True
            return
        self.shown = None
        self.budget -= len(tokens)
        self.read(tokens)
        self.turn += 1

    def context(self) -> Int32Array:
        """int32 [length]: all that it has read and said."""
        if len(self.tokens) > 1:
            self.tokens = (np.concatenate(self.tokens),)
        return self.tokens[0] if self.tokens else _NO_TOKENS

    def _take(self, sampled: Completion) -> None:
        if sampled.sampling_mask is not None:
            self.masks += ((self.length, sampled.sampling_mask),)
        if sampled.routed_experts is not None:
            self.routed += (sampled.routed_experts,)
        self._append(sampled.tokens, sampled.logprobs, sampled.weight_versions)
        number = len(sampled.tokens)
        self.budget -= number
        self.num_generated += number

    def _append(self, tokens: Int32Array, logprobs: Float32Array, versions: Int32Array) -> None:
        self.tokens += (tokens,)
        self.logprobs += (logprobs,)
        self.versions += (versions,)
        self.length += len(tokens)


_Pieces: TypeAlias = tuple[tuple[Int32Array, ...], tuple[Float32Array, ...], tuple[Int32Array, ...]]
"""Tokens, log-probabilities and versions."""


@lru_cache(maxsize=64)
def _not_generated(number: int) -> tuple[Float32Array, Int32Array]:
    """Log-probabilities and weight versions of so many tokens that the policy did not say, which many episodes share."""
    columns = np.zeros(number, np.float32), np.full(number, NOT_GENERATED, np.int32)
    for column in columns:
        column.flags.writeable = False
    return columns


@define(kw_only=True, eq=False)
class EpisodeGroup:
    """The samples of one row, which share its prompt."""

    number: int
    """Its number in the run."""
    instead: Row | None = None
    """The row that takes the place of its own, whose prompt is over the limit."""
    spare: int | None = None
    """Which of the rows behind those of its step that is, counted from 0."""
    num_long: int = 0
    """Rows whose prompts were over the limit."""
    reset: ResetResult | None = None
    """What the environment began with; None before, and where that failed."""
    prompt: Int32Array = field(factory=lambda: _NO_TOKENS)
    """int32 [length]; of a group whose environment failed, one token in place of it."""
    images: tuple[bytes, ...] = ()
    """What the prompt shows, in order."""
    is_left_out: bool = False
    """Whether its row's prompt is over the limit, and no other takes its place."""
    episodes: list[Episode] = field(factory=list)
    """Empty until the environment has begun, and where it is left out."""
    max_turn_tokens: int | None = None
    _first_open: int = 0
    """All episodes before this one have ended."""

    @property
    def has_begun(self) -> bool:
        """Whether it is known what its prompt is."""
        return self.is_left_out or bool(self.episodes)

    def begin(
        self,
        prompt: Int32Array,
        reset: ResetResult | None,
        group_size: int,
        budget: int,
        max_turn_tokens: int | None = None,
        images: tuple[bytes, ...] = (),
    ) -> None:
        """Begin the episodes after a prompt; with none to answer where the environment failed."""
        self.prompt, self.reset, self.max_turn_tokens, self.images = prompt, reset, max_turn_tokens, images
        first, pieces = self.number * group_size, self._pieces()
        self.episodes = [self._episode(number, budget, pieces) for number in range(first, first + group_size)]

    def all_ended(self) -> bool:
        """Whether all episodes have ended. It is asked at the end of each, and looks at each once."""
        episodes, first = self.episodes, self._first_open
        while first < len(episodes) and episodes[first].ended:
            first += 1
        self._first_open = first
        return first == len(episodes)

    def has_signal(self, compared: Compared, *, masks_truncated: bool) -> bool:
        """Whether what is compared tells its episodes apart that are trained on, and which have all ended; True where it has
        none. With `masks_truncated` those are not that a limit of tokens or turns cut off."""
        trained = [one for one in self.episodes if one.valid and not (masks_truncated and one.truncated)]
        return self.is_left_out or has_reward_variance(
            [one.rewards for one in trained], [one.reward_components for one in trained], compared
        )

    @property
    def num_rewarded(self) -> int:
        """Its samples whose environment did not fail."""
        return sum(episode.valid for episode in self.episodes)

    @property
    def success_rate(self) -> float:
        """The share of these that solved it; 0.0 where there are none."""
        return sum(episode.success for episode in self.episodes if episode.valid) / max(self.num_rewarded, 1)

    def settle(self) -> None:
        """All episodes have ended: forget what only their environment needs."""
        self.reset = None
        for episode in self.episodes:
            episode.state = episode.said = None

    def restart(self, budget: int) -> list[Episode]:
        """Begin again, behind the prompt, the episodes that have not ended and have said something; these."""
        restarted, pieces = [], self._pieces()
        for member, episode in enumerate(self.episodes):
            if not episode.ended and episode.num_generated:
                self.episodes[member] = self._episode(episode.number, budget, pieces)
                restarted.append(self.episodes[member])
        return restarted

    def _pieces(self) -> "_Pieces":
        """What its episodes have read at first, which they share."""
        logprobs, versions = _not_generated(len(self.prompt))
        return (self.prompt,), (logprobs,), (versions,)

    def _episode(self, number: int, budget: int, pieces: "_Pieces") -> Episode:
        failed = self.reset is None
        tokens, logprobs, versions = pieces
        return Episode(
            number=number,
            state=None if self.reset is None else self.reset.state,
            budget=budget,
            max_turn_tokens=self.max_turn_tokens,
            tools=() if self.reset is None else self.reset.observation.tools,
            images=self.images,
            valid=not failed,
            ended=failed,
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            length=len(self.prompt),
        )
