"""Rewarded samples of prompts: episodes between generator and environment, packed into one batch."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.chat.conversation import History
from rlcore.run.protocols import CollectedRollouts
from rlcore.run.rollout.episode import NOT_GENERATED, Episode, EpisodeGroup
from rlcore.run.rollout.episode_run import EpisodeRun
from rlcore.run.rollout.episode_starts import PromptLimit, StepPlans
from rlcore.run.rollout.group_starts import GroupOptions
from rlcore.run.rollout.masked_failures import MaskedFailures
from rlcore.run.rollout.prompt_groups import PromptGroups
from rlcore.run.rollout.replay import ReplayGroups, ReplaySchedule, ReplayTurns
from rlcore.run.rollout.reward_components import reward_components
from rlcore.run.rollout.reward_differences import Compared
from rlcore.run.rollout.schedule import Schedule
from rlcore.run.rollout.step_collector import StepCollector
from rlcore.run.rollout.turns import OnTokens, TurnOptions, Turns
from rlcore.spi.arrays import AnyArray, Int64Array, offsets_of

_COLUMNS = (
    *("length", "tokens", "logprobs", "versions", "valid", "truncated", "timed_out", "routed", "images"),
    *("rewards", "reward_components", "success", "finish_reason", "text", "num_generated", "metrics"),
)
_OF_EPISODE = attrgetter(*_COLUMNS)


@frozen(kw_only=True, eq=False)
class RolloutCollector(StepCollector[EpisodeGroup]):
    """Episodes between generator and environment, turn after turn. A schedule of a file is replayed."""

    prompt_limit: PromptLimit
    max_turns: int
    max_turn_tokens: int | None = None
    episode_timeout_s: float | None = None
    masks_truncated: bool = False
    """Whether episodes that a limit of tokens or turns cut off are masked."""
    compares: Compared = "rewards"
    """What tells the samples of a group apart."""
    history: History = "refuse"
    """What to do where the chat template would rewrite what it has shown."""
    routed_experts: bool = False
    """Whether the batch is to say which experts the generator sent each token to."""
    on_tokens: OnTokens | None = None
    """Called with the tokens of each sample, int32 [length], and its images, as soon as they are all there."""

    def work_of(self, schedule: Schedule, plans: StepPlans, failures: MaskedFailures) -> PromptGroups:
        """See StepCollector."""
        policy, group_size = schedule.policy, self.samples_per_prompt
        make_turns: Callable[..., Turns] = Turns
        make_work: Callable[..., PromptGroups] = PromptGroups
        if isinstance(schedule, ReplaySchedule):
            make_turns, make_work = partial(ReplayTurns, recorded=schedule.recorded), partial(ReplayGroups, schedule=schedule)
        turns = make_turns(
            options=TurnOptions(
                sampling=self.sampling,
                max_turns=self.max_turns,
                history=self.history,
                tool_parser=self.tool_parser,
                timeout_s=None if isinstance(schedule, ReplaySchedule) else self.episode_timeout_s,
                routed_experts=self.routed_experts,
                sampling_mask=self.sampling_mask,
                on_tokens=self.on_tokens,
            ),
            runner=self.episodes,
            tokenizer=self.tokenizer,
            failures=failures,
            seed_of=plans.seed,
            num_samples=policy.groups_per_step * group_size,
            on_sampled=self.progress.samples,
        )
        options = GroupOptions(
            group_size=group_size,
            prompt_limit=self.prompt_limit,
            max_response_tokens=self.max_response_tokens,
            max_turn_tokens=self.max_turn_tokens,
            masks_truncated=self.masks_truncated,
            compares=self.compares,
            placeholder=(self.sampling.stop_token_ids or (0,))[0],
        )
        return make_work(options=options, plans=plans, runner=self.episodes, turns=turns, tokenizer=self.tokenizer)

    def note(self, run: EpisodeRun[EpisodeGroup], groups: Sequence[EpisodeGroup]) -> None:
        """See StepCollector; and which prompts were too long."""
        num_long = sum(group.num_long for group in groups)
        if num_long:
            limit = f"{self.prompt_limit.max_tokens} tokens ({self.prompt_limit.option})"
            left = f"{self.purpose} has {sum(not group.is_left_out for group in groups)} of {len(groups)}"
            self.progress.note(f"{self.prompt_limit.key}: {num_long} prompts are left out: they have more than {limit}; {left}")
        super().note(run, groups)

    def packed(self, groups: Sequence[EpisodeGroup]) -> CollectedRollouts:
        """See StepCollector."""
        groups = [group for group in groups if not group.is_left_out]
        episodes = [episode for group in groups for episode in group.episodes]
        of = _columns(groups)
        offsets = offsets_of(of["length"])
        tokens, logprobs, versions = (
            np.concatenate(list(chain.from_iterable(of[name]))) for name in ("tokens", "logprobs", "versions")
        )
        failed = ~np.array(of["valid"], np.bool_)
        truncated, timed_out = (np.array(of[name], np.bool_) for name in ("truncated", "timed_out"))
        valid = ~(failed | truncated) if self.masks_truncated else ~failed
        loss_mask = versions != NOT_GENERATED
        if not valid.all():
            loss_mask = loss_mask & np.repeat(valid, np.diff(offsets))
            logprobs = np.where(loss_mask, logprobs, np.float32(0.0))
        batch = spi.TokenBatch(
            tokens=tokens,
            offsets=offsets,
            loss_mask=loss_mask,
            token_columns={
                spi.GENERATION_LOGPROBS: logprobs,
                spi.WEIGHT_VERSIONS: versions,
                **_routed_experts(of["routed"], offsets),
            },
            sequence_columns={spi.GROUP_IDS: np.repeat(np.arange(len(groups), dtype=np.int32), self.samples_per_prompt)},
            sampling_mask=_sampling_mask(episodes, offsets) if self.sampling_mask else None,
            images=tuple(of["images"]) if any(of["images"]) else None,
        )
        rewards = np.array(list(map(sum, of["rewards"])), np.float64)
        return CollectedRollouts(
            batch=batch,
            rewards=np.where(valid, rewards, 0.0).astype(np.float32),
            valid=valid,
            reward_components=reward_components(of["reward_components"], valid),
            finish_reasons=np.array(of["finish_reason"], np.uint8),
            success=np.array(of["success"], np.bool_) & valid,
            responses=of["text"],
            num_generated=np.array(of["num_generated"], np.int64),
            environment_metrics=_environment_metrics(compress(of["metrics"], of["valid"])),
            failed=failed,
            truncated=truncated,
            timed_out=timed_out,
            turns=_turns(episodes, offsets) if self.max_turns > 1 else None,
        )


def _columns(groups: Sequence[EpisodeGroup]) -> dict[str, list[Any]]:
    """What the episodes of some groups have under each of _COLUMNS. Group by group: all episodes are more than the processor's
    caches hold, and would have to come from memory for each column."""
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for group in groups:
        for column, values in zip(columns.values(), zip(*map(_OF_EPISODE, group.episodes), strict=True), strict=True):
            column.extend(values)
    return columns


def _routed_experts(routed: Sequence[Sequence[AnyArray]], offsets: Int64Array) -> dict[str, AnyArray]:
    """The column ROUTED_EXPERTS, where it is wanted: of a token that several turns have read, what the last one reports."""
    if not any(routed):
        return {}
    shape = next(rows.shape[1:] for pieces in routed for rows in pieces)
    column = np.full((int(offsets[-1]), *shape), -1, np.int16)
    for pieces, start in zip(routed, offsets.tolist(), strict=False):
        for rows in pieces:
            target = column[start : start + len(rows)]
            np.copyto(target, rows, where=rows >= 0)
    return {spi.ROUTED_EXPERTS: column}


def _sampling_mask(episodes: Sequence[Episode], offsets: Int64Array) -> spi.SamplingMask:
    """What each token was chosen among; empty rows where it was read."""
    parts, end = [], 0
    for episode, first in zip(episodes, offsets.tolist(), strict=False):
        for start, mask in episode.masks:
            parts += [spi.SamplingMask.whole(first + start - end), mask]
            end = first + start + len(mask)
    return spi.SamplingMask.join([*parts, spi.SamplingMask.whole(int(offsets[-1]) - end)])


def _environment_metrics(reported: Iterable[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """Means over what valid episodes reported: one that failed in a later turn counts in none of its turns."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in chain.from_iterable(reported):
        values[name].append(value)
    return {name: float(np.mean(found)) for name, found in values.items()}


def _turns(episodes: Sequence[Episode], offsets: Int64Array) -> spi.TurnRewards:
    """Which turn each token is of, and what each turn earned."""
    turn_of = np.full(int(offsets[-1]), -1, np.int32)
    for episode, first in zip(episodes, offsets.tolist(), strict=False):
        for number, (start, end) in enumerate(episode.turns):
            turn_of[first + start : first + end] = number
    return spi.TurnRewards(
        rewards=np.array([reward for episode in episodes for reward in episode.rewards], np.float32),
        offsets=offsets_of([len(episode.turns) for episode in episodes]),
        turn_of=turn_of,
    )
