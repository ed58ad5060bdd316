"""The episodes of one row: their common prompt, whether their rewards differ, and the columns of the rewards' components."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np
from attrs import define, field

from rlcore.spi import EpisodeFailure, ResetResult, Row
from rlcore.spi.arrays import BoolArray, Float32Array, Int32Array
from rlcore_rollout.episode import NO_TOKENS, Episode, not_generated

RELATIVE_RESOLUTION = 1e-6
"""Rewards that differ by no more than this share of their magnitude are equal: about eight float32 roundings."""
SMALLEST_DIFFERENCE = 1e-12
"""Rewards that differ by no more than this are equal whatever their magnitude: parts of a reward that cancel, of turns or of
functions, leave roundings, such as 0.1 + 0.2 - 0.3, which is not 0."""

Compared: TypeAlias = Literal["rewards", "turn_rewards", "reward_components"]
"""As AlgorithmNeeds.compares."""
_Pieces: TypeAlias = tuple[tuple[Int32Array, ...], tuple[Float32Array, ...], tuple[Int32Array, ...]]
"""Tokens, log-probabilities and versions."""


@define(kw_only=True, eq=False)
class EpisodeGroup:
    """The samples of one row, which share its prompt."""

    number: int
    """Its number in the run."""
    replacement: Row | None = None
    """The row that takes the place of its own, whose prompt is over the limit."""
    spare: int | None = None
    """Which of the rows behind those of its step that is, counted from 0."""
    num_long: int = 0
    """Rows whose prompts were over the limit."""
    reset: ResetResult | None = None
    """The environment's first result; None before, and where that failed."""
    prompt: Int32Array = field(factory=lambda: NO_TOKENS)
    """int32 [length]; of a group whose environment failed, one token in place of it."""
    images: tuple[bytes, ...] = ()
    """The prompt's images, in order."""
    is_left_out: bool = False
    """True where its row's prompt is over the limit, and no other takes its place."""
    episodes: list[Episode] = field(factory=list)
    """Empty until the environment has begun, and where it is left out."""
    max_turn_tokens: int | None = None
    _first_open: int = 0
    """All episodes before this one have ended."""

    @property
    def has_begun(self) -> bool:
        """Return whether it is known what its prompt is."""
        return self.is_left_out or bool(self.episodes)

    def begin(
        self,
        prompt: Int32Array,
        reset: ResetResult | None,
        group_size: int,
        budget: int,
        max_turn_tokens: int | None = None,
        images: tuple[bytes, ...] = (),
        num_samples: int | None = None,
    ) -> None:
        """Begin the episodes after a prompt, all of `group_size` or the first `num_samples`; with none to answer where the
        environment failed."""
        self.prompt, self.reset, self.max_turn_tokens, self.images = prompt, reset, max_turn_tokens, images
        self.episodes = []
        self.extend(self.number * group_size, num_samples or group_size, budget)

    def extend(self, first: int, num_samples: int, budget: int) -> list[Episode]:
        """Begin further episodes after the prompt, numbered from `first`; these."""
        pieces = self._pieces()
        begun = [self._episode(number, budget, pieces) for number in range(first, first + num_samples)]
        self.episodes += begun
        return begun

    def all_ended(self) -> bool:
        """Return whether all episodes have ended. It is asked at the end of each, and looks at each once."""
        episodes, first = self.episodes, self._first_open
        while first < len(episodes) and episodes[first].ended:
            first += 1
        self._first_open = first
        return first == len(episodes)

    def has_signal(self, compared: Compared, *, masks_truncated: bool) -> bool:
        """Return whether what is compared tells its episodes apart that are trained on, and which have all ended; True where it
        has none. With `masks_truncated` those are not that a limit of tokens or turns cut off."""
        trained = [one for one in self.episodes if one.valid and not (masks_truncated and one.truncated)]
        rewards = [one.rewards for one in trained]
        if compared == "turn_rewards":
            rewards = [tuple(reward for _, _, reward, _ in one.rewarded_parts()) for one in trained]
        return self.is_left_out or has_reward_variance(rewards, [one.reward_components for one in trained], compared)

    @property
    def num_rewarded(self) -> int:
        """Its samples whose environment did not fail."""
        return sum(episode.valid for episode in self.episodes)

    @property
    def rewards(self) -> list[float]:
        """See OpenGroup."""
        return [sum(episode.rewards) for episode in self.episodes if episode.valid]

    @property
    def success_rate(self) -> float:
        """The share of these that solved it; 0.0 where there are none."""
        return sum(episode.success for episode in self.episodes if episode.valid) / max(self.num_rewarded, 1)

    def endings(self) -> list[EpisodeFailure | None]:
        """See OpenGroup."""
        return [episode.ending for episode in self.episodes if episode.ended]

    def finish(self) -> None:
        """All episodes have ended: forget what only their environment needs."""
        self.reset = None
        for episode in self.episodes:
            episode.state = episode.unanswered_turn = None

    def restart(self, budget: int) -> list[Episode]:
        """Begin again, behind the prompt, the episodes that have not ended and have said something; these."""
        restarted, pieces = [], self._pieces()
        for member, episode in enumerate(self.episodes):
            if not episode.ended and episode.num_generated:
                self.episodes[member] = self._episode(episode.number, budget, pieces)
                restarted.append(self.episodes[member])
        return restarted

    def _pieces(self) -> _Pieces:
        """Return the first tokens of its episodes, which they share."""
        logprobs, versions = not_generated(len(self.prompt))
        return (self.prompt,), (logprobs,), (versions,)

    def _episode(self, number: int, budget: int, pieces: _Pieces) -> Episode:
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


def has_reward_variance(
    rewards: Sequence[Sequence[float]], components: Sequence[Mapping[str, float]], compared: Compared
) -> bool:
    """Return whether a comparison of the samples of a group, given what each earned by its turns, and by the parts of its
    reward that have names, has anything to say. False of a single sample, and of none."""
    # Without parts there is nothing to go by but the whole; the algorithm then says that they are missing.
    if compared == "rewards" or (compared == "reward_components" and not any(components)):
        return differ([sum(of_turns) for of_turns in rewards])
    if compared == "reward_components":
        return any(differ([one.get(name, 0.0) for one in components]) for name in set(chain.from_iterable(components)))
    num_turns = max(map(len, rewards), default=0)
    return any(differ([sum(of_turns[turn:]) for of_turns in rewards if turn < len(of_turns)]) for turn in range(num_turns))


def differ(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ by more than roundings, such as that of 0.1 + 0.2. False of a single one, and of none."""
    if not rewards:
        return False
    return max(rewards) - min(rewards) > max(RELATIVE_RESOLUTION * max(map(abs, rewards)), SMALLEST_DIFFERENCE)


def reward_components(episodes: Sequence[Mapping[str, float]], valid: BoolArray) -> dict[str, Float32Array]:
    """float32 [N] by name, names sorted: 0.0 where one of N `episodes` has no such part, and where `valid` is False."""
    names = sorted(set(chain.from_iterable(episodes)))
    return {name: np.where(valid, [episode.get(name, 0.0) for episode in episodes], 0.0).astype(np.float32) for name in names}
