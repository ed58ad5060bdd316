"""Starts groups: resets the environment, encodes the prompt, and leaves out prompts that are too long."""

from collections.abc import Callable, Collection, Mapping

import numpy as np
from attrs import frozen

from rlcore.chat.tool_calls import FORMS
from rlcore.run.data.prompts import encode_prompts, prompt_images
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.rollout.environment_calls import EnvironmentCalls
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.episode import EpisodeGroup
from rlcore.run.rollout.episode_failure import Failure
from rlcore.run.rollout.episode_starts import PromptLimit, StepBatch, StepPlans
from rlcore.run.rollout.reward_differences import Compared
from rlcore.run.rollout.turns import Turns
from rlcore.spi import ConfigError, Problem, ResetResult, Row


@frozen(kw_only=True)
class GroupOptions:
    """What all groups of a run have in common."""

    group_size: int
    """Samples of a group."""
    prompt_limit: PromptLimit
    max_response_tokens: int
    max_turn_tokens: int | None
    masks_truncated: bool = False
    """Whether episodes that a limit of tokens or turns cut off are not trained on."""
    compares: Compared = "rewards"
    """What tells the samples of a group apart."""
    placeholder: int
    """The token that stands for the prompt of a group whose environment failed to begin: a batch has no empty sequence."""


class GroupStarts:
    """Groups whose prompts are not known yet, on the environment's event loop."""

    def __init__(
        self,
        *,
        options: GroupOptions,
        plans: StepPlans,
        runner: EpisodeRunner,
        turns: Turns,
        tokenizer: Tokenizer,
        failed_before: Callable[[int], str | None],
    ) -> None:
        """`failed_before` returns why a group's environment failed to begin in the run that is replayed."""
        self._options = options
        self._plans = plans
        self._runner = runner
        self._turns = turns
        self._tokenizer = tokenizer
        self._failed_before = failed_before
        self._calls: EnvironmentCalls
        self._on_ended: Callable[[int], None]
        self._beginning: dict[int, tuple[EpisodeGroup, StepBatch]] = {}
        """By number, each with the groups that began together with it."""
        self._resets: list[tuple[EpisodeGroup, Row, ResetResult]] = []
        """Groups whose prompts are to be encoded, with their rows."""

    def begin(self, calls: EnvironmentCalls, on_ended: Callable[[int], None]) -> None:
        """Work on this event loop from now on; `on_ended` is called with each group that ends as it begins."""
        self._calls, self._on_ended, self._resets = calls, on_ended, []

    def start(self, groups: Collection[EpisodeGroup], *, together: bool) -> None:
        """Begin groups. Those of one step form a step batch."""
        steps: dict[int, list[EpisodeGroup]] = {}
        for group in groups:
            steps.setdefault(self._plans.step_of(group.number), []).append(group)
        for step, members in steps.items():
            step_batch = StepBatch(
                plan=self._plans.of_step(step),
                limit=self._options.prompt_limit,
                num_unknown=len(members),
                groups=members if together else (),
            )
            self._beginning |= {group.number: (group, step_batch) for group in members}
        for group in groups:
            self._turns.task_pool.add(self._reset, group, group.number)

    def forget(self, numbers: Collection[int]) -> None:
        """Groups are open no longer, of which some may have begun."""
        left = {number: self._beginning.pop(number)[1] for number in numbers if number in self._beginning}
        for number, step_batch in left.items():
            step_batch.give_up(self._plans.place_of(number))
        for number, step_batch in left.items():
            self._give_places(number, step_batch.resolve())

    def _begins(self, group: EpisodeGroup) -> bool:
        return group.number in self._beginning and self._beginning[group.number][0] is group

    async def _reset(self, group: EpisodeGroup) -> None:
        """Let the environment begin. Prompts are encoded with all that come at the same moment."""
        if not self._begins(group):
            return
        if (reason := self._failed_before(group.number)) is not None:
            self._fail(group, Failure(reason=reason))
            return
        plan, place = self._plans.of_step(self._plans.step_of(group.number)), self._plans.place_of(group.number)
        row = plan.rows[place] if group.instead is None else group.instead
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
            self._turns.task_pool.add(self._show_prompts)

    async def _show_prompts(self, _: None) -> None:
        """Encode prompts, and ask for the first turn of those within the limit."""
        await self._calls.others()
        resets, self._resets = [one for one in self._resets if self._begins(one[0])], []
        encoded = encode_prompts([reset.observation for _, _, reset in resets], self._tokenizer)
        options, turns = self._options, self._turns
        for (group, row, reset), tokens in zip(resets, encoded, strict=True):
            if len(tokens) > options.prompt_limit.max_tokens:
                group.num_long += 1
                step_batch = self._beginning[group.number][1]
                self._give_places(group.number, step_batch.too_long(self._plans.place_of(group.number), row, len(tokens)))
                continue
            if reset.observation.tools and not turns.reads_calls:
                raise no_parser()
            prompt = np.asarray(tokens, np.int32)
            images = prompt_images(reset.observation.messages)
            group.begin(prompt, reset, options.group_size, options.max_response_tokens, options.max_turn_tokens, images)
            if turns.conversations is not None:
                turns.conversations.begin([episode.number for episode in group.episodes], reset.observation)
            step_batch = self._beginning.pop(group.number)[1]
            if not step_batch.groups:
                turns.go_on(group.episodes)
            self._give_places(group.number, step_batch.begun())
            self._go_on_together(step_batch)

    def _fail(self, group: EpisodeGroup, failure: Failure) -> None:
        """All samples of a group whose environment failed to begin have failed."""
        options = self._options
        group.begin(np.array([options.placeholder], np.int32), None, options.group_size, options.max_response_tokens)
        for episode in group.episodes:
            self._turns.fail(episode.number, failure.reason)
        step_batch = self._beginning.pop(group.number)[1]
        self._give_places(group.number, step_batch.begun())
        self._on_ended(group.number)
        self._go_on_together(step_batch)

    def _go_on_together(self, step_batch: StepBatch) -> None:
        """Ask for the first turns of groups, once all of them have begun."""
        if step_batch.all_begun():
            self._turns.go_on([episode for group in step_batch.groups for episode in group.episodes if not episode.ended])

    def _give_places(self, number: int, rows: Mapping[int, Row | None]) -> None:
        """Begin the groups at some places of a group's step with other rows, or leave them out."""
        first = number - self._plans.place_of(number)
        num_spared = self._plans.of_step(self._plans.step_of(number)).num_spared - sum(row is not None for row in rows.values())
        for place, row in rows.items():
            group, step_batch = self._beginning[first + place]
            group.instead = row
            if row is not None:
                group.spare, num_spared = num_spared, num_spared + 1
                self._turns.task_pool.add(self._reset, group, group.number)
            else:
                group.is_left_out = True
                del self._beginning[group.number]
                self._on_ended(group.number)
                self._go_on_together(step_batch)


def no_parser() -> ConfigError:
    """Return the error for prompts with tools where rlcore cannot read the template's form of calls."""
    return ConfigError(
        [
            Problem(
                path="rollout.tool_parser",
                found='"auto", prompts with tools, and a chat template that shows no form of calls that the core reads',
                expected=f"one of {', '.join(FORMS)}, or the name of a parser that the generator brings",
            )
        ]
    )
