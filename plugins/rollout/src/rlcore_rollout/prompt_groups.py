"""Groups of episodes that share a prompt: their beginnings, their turns, and what a checkpoint keeps of them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from rlcore.run.data.text import renderer
from rlcore.spi import ConfigError, Problem, ResetResult, Row, Tokenizer
from rlcore_rollout.environment_calls import EnvironmentCalls
from rlcore_rollout.environment_results import Failure
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.episode import Episode
from rlcore_rollout.episode_group import Compared, EpisodeGroup
from rlcore_rollout.group_work import GroupResult, GroupWork, PromptEvents
from rlcore_rollout.step_plans import PromptLimit, StepPlans
from rlcore_rollout.trace_records import GroupRecord, group_record
from rlcore_rollout.turns import Turns


@frozen(kw_only=True)
class GroupOptions:
    """The settings that all groups of a run share."""

    group_size: int
    """Samples of a group; with `round_size`, at most."""
    round_size: int | None = None
    """Samples that a group begins with, and gets more of as long as nothing can be learned from it; None for all at once."""
    prompt_limit: PromptLimit
    max_response_tokens: int
    max_turn_tokens: int | None
    masks_truncated: bool = False
    """True where episodes that a limit of tokens or turns cut off are not trained on."""
    compares: Compared = "rewards"
    """The figures in which the samples of a group may differ."""
    placeholder: int
    """The token that stands for the prompt of a group whose environment failed to begin: a batch has no empty sequence."""


class PromptGroups(GroupWork[EpisodeGroup]):
    """Begins groups: resets the environment, encodes the prompt, leaves out prompts that are too long. Takes their episodes
    through their turns."""

    def __init__(
        self, *, options: GroupOptions, plans: StepPlans, runner: EpisodeRunner, turns: Turns, tokenizer: Tokenizer
    ) -> None:
        self.turns = turns
        self.plans = plans
        self.group_size = options.group_size
        self.requests, self.count, self.task_pool, self.failures = turns.requests, turns.count, turns.task_pool, turns.failures
        self._options = options
        self._runner = runner
        self._tokenizer = tokenizer
        self._calls: EnvironmentCalls
        self._on_ended: Callable[[int], None]
        self._prompts: PromptEvents
        self._together = False
        """True where groups that begin wait for `go_on`."""
        self._beginning: dict[int, EpisodeGroup] = {}
        """Groups whose prompts are not known yet, by number."""
        self._too_long: set[int] = set()
        """Groups among them that wait for another row."""
        self._waiting: dict[int, EpisodeGroup] = {}
        """Groups that wait for `go_on`, by number."""
        self._resets: list[tuple[EpisodeGroup, Row, ResetResult]] = []
        """Groups whose prompts are to be encoded, with their rows."""

    def failed_before(self, number: int) -> Failure | None:  # noqa: ARG002 - a replay knows
        """Return how a group's environment is to fail as it begins; None where it is asked."""
        return None

    def new_group(self, number: int) -> EpisodeGroup:
        """See GroupWork."""
        return EpisodeGroup(number=number)

    def end(self) -> None:
        """See GroupWork."""
        self.turns.end()

    def begin(
        self,
        calls: EnvironmentCalls,
        on_ended: Callable[[int], None],
        look: Callable[[], None],  # noqa: ARG002 - a replay looks
        prompts: PromptEvents,
    ) -> None:
        """See GroupWork."""
        self._calls, self._on_ended, self._prompts, self._resets = calls, on_ended, prompts, []
        self.turns.begin(calls, self._end)

    def _end(self, episode: Episode) -> None:
        self._on_ended(episode.number // self.group_size)

    def begins(self, group: EpisodeGroup) -> bool:
        """See GroupWork."""
        return not group.has_begun

    def start(self, groups: Collection[EpisodeGroup], *, together: bool) -> None:
        """See GroupWork."""
        self._together = together
        begin = [group for group in groups if not group.has_begun]
        for group in groups:
            if group.has_begun and group.number not in self._waiting:
                if running := [episode for episode in group.episodes if not episode.ended]:
                    self.turns.go_on(running)
                else:
                    self._on_ended(group.number)
        self._beginning |= {group.number: group for group in begin}
        for group in begin:
            if group.number not in self._too_long:
                self.turns.task_pool.add(self._reset, group, group.number)

    def replace(self, group: EpisodeGroup, row: Row | None, spare: int) -> None:
        """See GroupWork."""
        self._too_long.discard(group.number)
        group.replacement = row
        if row is not None:
            group.spare = spare
            self.turns.task_pool.add(self._reset, group, group.number)
        else:
            group.is_left_out = True
            del self._beginning[group.number]
            self._on_ended(group.number)

    def go_on(self, numbers: Collection[int]) -> None:
        """See GroupWork."""
        groups = [self._waiting.pop(number) for number in numbers if number in self._waiting]
        self.turns.go_on([episode for group in groups for episode in group.episodes if not episode.ended])

    def take_arrived(self) -> None:
        """See GroupWork."""
        self.turns.take_arrived()

    def forget(self, groups: Collection[EpisodeGroup]) -> None:
        """See GroupWork."""
        self.turns.forget(episode for group in groups for episode in group.episodes)
        for group in groups:
            self._beginning.pop(group.number, None)
            self._waiting.pop(group.number, None)
            self._too_long.discard(group.number)

    def restart(self, group: EpisodeGroup, *, is_at_work: bool) -> bool:
        """See GroupWork."""
        before, restarted = list(group.episodes), group.restart(self._options.max_response_tokens)
        self.turns.forget(set(before) - set(group.episodes))
        if group.reset is not None and self.turns.conversations is not None:
            self.turns.conversations.begin([episode.number for episode in restarted], group.reset.observation)
        if restarted and is_at_work:
            self.turns.go_on(restarted)
        return len(restarted) == len(group.episodes)

    def row(self, group: EpisodeGroup) -> Row | None:
        """See GroupWork."""
        own = group.replacement if group.replacement is not None else super().row(group)
        return None if group.is_left_out else own

    def row_number(self, group: EpisodeGroup) -> int | None:
        """See GroupWork."""
        return None if group.replacement is not None else super().row_number(group)

    def extend(self, group: EpisodeGroup) -> bool:
        """See GroupWork: a round more, where the rewards so far tell no samples apart."""
        size, reset = self._options.round_size, group.reset
        if size is None or reset is None or not self.wants_more(group):
            return False
        first = group.number * self.group_size + len(group.episodes)
        begun = group.extend(first, size, self._options.max_response_tokens)
        if self.turns.conversations is not None:
            self.turns.conversations.begin([episode.number for episode in begun], reset.observation)
        self.turns.go_on(begun)
        return True

    def wants_more(self, group: EpisodeGroup) -> bool:
        """Return whether a group that has ended gets another round: some of its samples have a reward, all rewards are equal,
        and there is room."""
        return group.num_rewarded > 0 and len(group.episodes) < self.group_size and not self.has_signal(group)

    def has_signal(self, group: EpisodeGroup) -> bool:
        """See GroupWork."""
        return group.has_signal(self._options.compares, masks_truncated=self._options.masks_truncated)

    def result(self, group: EpisodeGroup) -> GroupResult:
        """See GroupWork."""
        is_own = group.replacement is None and not group.num_long
        result = super().result(group)
        if is_own and not group.is_left_out:
            return result
        return evolve(result, replacement=group.replacement, num_long=group.num_long, is_left_out=group.is_left_out)

    def records(self, groups: Sequence[EpisodeGroup]) -> list[GroupRecord]:
        """See GroupWork."""
        return [group_record(group, self.failures.reasons) for group in groups]

    def saved(self, group: EpisodeGroup) -> object:
        """See GroupWork: the group with its conversations."""
        conversations = self.turns.conversations
        if conversations is None:
            return group, {}
        return group, {one.number: conversations.state(one.number) for one in group.episodes if one.number in conversations}

    def resumed(self, kept: Any) -> EpisodeGroup | None:
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
        """Return whether a group that another run has begun is what it would be here: of as many samples and, unless it has
        ended, within the same limits."""
        if not group.has_begun or group.is_left_out:
            return True
        options, num_read = self._options, len(group.prompt)
        is_of_rounds = len(group.episodes) % (options.round_size or self.group_size) == 0
        return (
            is_of_rounds
            and group.episodes[0].number == group.number * self.group_size
            and all(
                episode.ended
                or (
                    num_read <= options.prompt_limit.max_tokens
                    and episode.given_budget == options.max_response_tokens
                    and episode.max_turn_tokens == options.max_turn_tokens
                    and self.turns.can_read(episode)
                )
                for episode in group.episodes
            )
        )

    def _begins(self, group: EpisodeGroup) -> bool:
        return self._beginning.get(group.number) is group

    async def _reset(self, group: EpisodeGroup) -> None:
        """Let the environment begin. Prompts are encoded with all that come at the same moment."""
        if not self._begins(group):
            return
        if (failure := self.failed_before(group.number)) is not None:
            self._fail(group, failure)
            return
        plan, place = self.plans.of_step(self.plans.step_of(group.number)), self.plans.place_of(group.number)
        row = plan.rows[place] if group.replacement is None else group.replacement
        key = (group.number, group.num_long)
        call = self._runner.reset(row, plan.draws.reset_seeds[place], (place, len(plan.rows)), key)
        reset = await self._calls.make(call)
        if not self._begins(group):
            return  # given up meanwhile
        if isinstance(reset, Failure):
            self._runner.require(call, reset)
            self._fail(group, reset)
            return
        self._resets.append((group, row, reset))
        if len(self._resets) == 1:
            self.turns.task_pool.add(self._show_prompts)

    async def _show_prompts(self, _: None) -> None:
        """Encode prompts, and ask for the first turn of those within the limit."""
        await self._calls.others()
        resets, self._resets = [one for one in self._resets if self._begins(one[0])], []
        encoded = renderer().encode_prompts([reset.observation for _, _, reset in resets], self._tokenizer)
        options, turns = self._options, self.turns
        for (group, row, reset), tokens in zip(resets, encoded, strict=True):
            if len(tokens) > options.prompt_limit.max_tokens:
                group.num_long += 1
                self._too_long.add(group.number)
                self._prompts.too_long(group.number, row, len(tokens))
                continue
            if reset.observation.tools and not turns.reads_calls:
                raise no_parser()
            prompt = np.asarray(tokens, np.int32)
            images = renderer().prompt_images(reset.observation.messages)
            limits = (options.max_response_tokens, options.max_turn_tokens)
            group.begin(prompt, reset, self.group_size, *limits, images, options.round_size)
            if turns.conversations is not None:
                turns.conversations.begin([episode.number for episode in group.episodes], reset.observation)
            del self._beginning[group.number]
            if self._together:
                self._waiting[group.number] = group
            else:
                turns.go_on(group.episodes)
            self._prompts.begun(group.number)

    def _fail(self, group: EpisodeGroup, failure: Failure) -> None:
        """All samples of a group whose environment failed to begin have failed."""
        options = self._options
        prompt, size = np.array([options.placeholder], np.int32), self._options.round_size
        group.begin(prompt, None, self.group_size, options.max_response_tokens, num_samples=size)
        for episode in group.episodes:
            episode.failure = failure.ending
            self.turns.fail(episode.number, failure.reason)
        del self._beginning[group.number]
        self._on_ended(group.number)
        self._prompts.begun(group.number)


def no_parser() -> ConfigError:
    """Return the error for prompts with tools where rlcore cannot read the template's form of calls."""
    return ConfigError(
        [
            Problem(
                path="rollout.tool_parser",
                found='"auto", prompts with tools, and a chat template that shows no form of calls that the core reads',
                expected=f"one of {', '.join(renderer().tool_forms())}, or the name of a parser that the generator brings",
            )
        ]
    )
