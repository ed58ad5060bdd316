"""Groups of episodes that say turn after turn: their beginnings, their turns, and what a checkpoint keeps of them."""

from collections.abc import Callable, Collection
from typing import Any

from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.rollout.environment_calls import EnvironmentCalls
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.episode import Episode, EpisodeGroup
from rlcore.run.rollout.episode_starts import StepPlans
from rlcore.run.rollout.group_starts import GroupOptions, GroupStarts
from rlcore.run.rollout.group_work import GroupWork
from rlcore.run.rollout.turns import Turns
from rlcore.spi import Row


class PromptGroups(GroupWork[EpisodeGroup]):
    """Begins groups with a prompt, and takes their episodes through their turns."""

    def __init__(
        self, *, options: GroupOptions, plans: StepPlans, runner: EpisodeRunner, turns: Turns, tokenizer: Tokenizer
    ) -> None:
        self.turns = turns
        self.plans = plans
        self.group_size = options.group_size
        self.feed, self.count, self.task_pool, self.failures = turns.feed, turns.count, turns.task_pool, turns.failures
        self._options = options
        self._starts = GroupStarts(
            options=options, plans=plans, runner=runner, turns=turns, tokenizer=tokenizer, failed_before=self.failed_before
        )
        self._on_ended: Callable[[int], None]

    def failed_before(self, number: int) -> str | None:  # noqa: ARG002 - a replay knows
        """Why a group's environment is to fail as it begins; None where it is asked."""
        return None

    def new_group(self, number: int) -> EpisodeGroup:
        """See GroupWork."""
        return EpisodeGroup(number=number)

    def end(self) -> None:
        """See GroupWork."""
        self.turns.end()

    def begin(self, calls: EnvironmentCalls, on_ended: Callable[[int], None], look: Callable[[], None]) -> None:  # noqa: ARG002
        """See GroupWork."""
        self._on_ended = on_ended
        self._starts.begin(calls, on_ended)
        self.turns.begin(calls, self._end)

    def _end(self, episode: Episode) -> None:
        self._on_ended(episode.number // self.group_size)

    def start(self, groups: Collection[EpisodeGroup], *, together: bool) -> None:
        """See GroupWork."""
        begin = [group for group in groups if not group.has_begun]
        for group in groups:
            if group.has_begun:
                if running := [episode for episode in group.episodes if not episode.ended]:
                    self.turns.go_on(running)
                else:
                    self._on_ended(group.number)
        self._starts.start(begin, together=together)

    def look(self) -> None:
        """See GroupWork."""
        self.turns.look()

    def forget(self, groups: Collection[EpisodeGroup]) -> None:
        """See GroupWork."""
        self.turns.forget(episode for group in groups for episode in group.episodes)
        self._starts.forget([group.number for group in groups])

    def restart(self, group: EpisodeGroup, *, is_at_work: bool) -> bool:
        """See GroupWork."""
        before, restarted = list(group.episodes), group.restart(self._options.max_response_tokens)
        self.turns.forget(set(before) - set(group.episodes))
        if group.reset is not None and self.turns.conversations is not None:
            self.turns.conversations.begin([episode.number for episode in restarted], group.reset.observation)
        if restarted and is_at_work:
            self.turns.go_on(restarted)
        return len(restarted) == self.group_size

    def row(self, group: EpisodeGroup) -> Row | None:
        """See GroupWork."""
        own = group.instead if group.instead is not None else super().row(group)
        return None if group.is_left_out else own

    def has_signal(self, group: EpisodeGroup) -> bool:
        """See GroupWork."""
        return group.has_signal(self._options.compares, masks_truncated=self._options.masks_truncated)

    def kept(self, group: EpisodeGroup) -> object:
        """See GroupWork: the group with its conversations."""
        conversations = self.turns.conversations
        if conversations is None:
            return group, {}
        return group, {one.number: conversations.state(one.number) for one in group.episodes if one.number in conversations}

    def take_up(self, kept: Any) -> EpisodeGroup | None:
        """See GroupWork."""
        if not isinstance(kept, tuple):  # a group of another kind of environment
            return None
        group, heard = kept
        if not isinstance(group, EpisodeGroup) or not all(isinstance(one, Episode) for one in group.episodes):
            raise TypeError(f"found a {type(group).__name__} of other objects; expected a group of episodes")
        if self.turns.conversations is not None:
            for episode, state in heard.items():
                self.turns.conversations.restore(episode, state)
        if self._can_go_on(group):
            found: EpisodeGroup = group
            return found
        self.turns.forget(group.episodes)
        return None

    def _can_go_on(self, group: EpisodeGroup) -> bool:
        """Whether a group that another run has begun is what it would be here: of as many samples and, unless it has ended,
        within the same limits."""
        if not group.has_begun or group.is_left_out:
            return True
        options, num_read = self._options, len(group.prompt)
        return len(group.episodes) == self.group_size and all(
            episode.ended
            or (
                num_read <= options.prompt_limit.max_tokens
                and episode.budget + episode.length - num_read == options.max_response_tokens
                and episode.max_turn_tokens == options.max_turn_tokens
                and self.turns.can_read(episode)
            )
            for episode in group.episodes
        )
