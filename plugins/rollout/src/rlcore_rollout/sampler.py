"""Rewarded samples of steps: a schedule's groups, run to their end and packed into one batch."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeAlias

import numpy as np
from attrs import evolve, fields, frozen
from numpy.typing import NDArray

from rlcore import spi
from rlcore.run.data.mixes import DATA_SET
from rlcore.run.data.text import History
from rlcore.run.protocols import CollectedRollouts
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.scorers import OnTokens
from rlcore.spi import Tokenizer, ToolParser
from rlcore.spi.arrays import AnyArray, Int32Array, Int64Array, UInt8Array, offsets_of
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.collector_messages import RunOptions
from rlcore_rollout.collectors import Collectors
from rlcore_rollout.environment_results import MaskedFailures
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.episode import NOT_GENERATED, EndedSegment, Episode
from rlcore_rollout.episode_group import Compared, EpisodeGroup, reward_components
from rlcore_rollout.episode_run import EpisodeRun
from rlcore_rollout.gc_tuning import only_young_collections
from rlcore_rollout.group_collector import GroupCollector
from rlcore_rollout.group_work import GroupResult, GroupRewards, GroupT, GroupWork
from rlcore_rollout.packed_groups import PackedGroups
from rlcore_rollout.prompt_groups import GroupOptions, PromptGroups
from rlcore_rollout.remote_collectors import CollectorProcesses, RemoteParts
from rlcore_rollout.schedule import Position, Schedule, SchedulePolicy
from rlcore_rollout.step_plans import Draws, PromptLimit, StepPlan, StepPlans
from rlcore_rollout.trace_records import StepRecord
from rlcore_rollout.turns import TurnOptions, Turns

SEGMENTS_PER_EPISODE = "segments_per_episode"
"""The metric of environments with the mean number of sequences of an episode."""
Distribution: TypeAlias = tuple[float, int, float, bool]
"""The distribution of the generator's log-probabilities: temperature, top_k and top_p, and whether it reports the kept
tokens."""


@frozen(kw_only=True, eq=False)
class StepSampler(ABC, Generic[GroupT]):
    """Collects the samples of steps. Every random choice follows from the plans of the steps."""

    generator: GeneratorGroup
    episodes: EpisodeRunner
    tokenizer: Tokenizer
    sampling: spi.SamplingParams
    samples_per_prompt: int
    """Samples of each prompt; with `round_size`, at most."""
    max_response_tokens: int
    max_failed_fraction: float
    """The largest share of the samples that may be masked, since their environment failed."""
    round_size: int | None = None
    """Samples that each prompt begins with, and gets more of as long as nothing can be learned from them; None for all at
    once."""
    sampling_mask: bool = False
    """True where the batch is to say what the generator chose each token among."""
    tool_parser: ToolParser | None = None
    """The parser of tool calls; None where nothing says how the model writes them."""
    compares: Compared = "rewards"
    """The figures in which the samples of a group may differ."""
    purpose: str = "the step"
    """The purpose of the samples, in words."""
    is_mixed: bool = False
    """True where the prompts are of several data sets, which their rows name."""
    clock: PhaseClock
    progress: Progress

    @property
    def distribution(self) -> Distribution:
        """The distribution that tokens are sampled from."""
        return self.sampling.temperature, self.sampling.top_k, self.sampling.top_p, self.sampling_mask

    def schedule(self, policy: SchedulePolicy, position: Position) -> Schedule:
        """The schedule of a run from a position on."""
        return Schedule(policy, position)

    @property
    def limit(self) -> PromptLimit | None:
        """Return the limit of prompts; None where episodes have none before they ask."""
        return None

    @abstractmethod
    def work_of(self, schedule: Schedule, plans: StepPlans, failures: MaskedFailures) -> GroupWork[GroupT]:
        """Return the work of a schedule's groups."""

    @abstractmethod
    def packed(self, groups: Sequence[GroupT]) -> PackedGroups:
        """Pack the samples of groups that have ended and are not left out."""

    def collect(
        self, rows: Sequence[spi.Row], weight_version: int, seed: Sequence[int], spare: Iterable[spi.Row] = ()
    ) -> CollectedRollouts:
        """`samples_per_prompt` samples of each row, adjacent. A row whose prompt is over the limit is replaced by one of
        `spare`, or else left out, where the recipe says so. `seed` is a key of numpy's SeedSequence."""
        plan = StepPlan(rows=rows, draws=Draws(seed, len(rows), self.samples_per_prompt), spare=iter(spare))
        run = self.run_of(Schedule(SchedulePolicy(groups_per_step=len(rows), num_steps=1)), lambda _: plan)
        try:
            collected = self.collect_step(run, weight_version)
        finally:
            run.close()  # behind a worker that died, too: it is another run that is tried again
        assert collected is not None, "nothing keeps it from going on"
        return collected

    def run_of(self, schedule: Schedule, plan_of: Callable[[int], StepPlan], *, overlaps: bool = False) -> EpisodeRun:
        """The episodes of a schedule; `plan_of` returns what the groups of a step begin with, steps counted from 0. With
        `overlaps` the generator goes on while others train."""
        policy, group_size = schedule.policy, self.samples_per_prompt
        failures = MaskedFailures(
            num_samples=policy.capacity * (self.round_size or group_size),
            of=self.purpose,
            max_fraction=self.max_failed_fraction,
        )
        plans = StepPlans(plan_of, policy.groups_per_step, group_size)
        return EpisodeRun(
            schedule=schedule,
            plans=plans,
            failures=failures,
            collectors=self.collectors(schedule, plans, failures, overlaps=overlaps),
            limit=self.limit,
            group_size=group_size,
        )

    def collectors(self, schedule: Schedule, plans: StepPlans, failures: MaskedFailures, *, overlaps: bool) -> Collectors:
        """Return what collects a schedule's groups: this process."""
        return GroupCollector(
            work=self.work_of(schedule, plans, failures),
            runner=self.episodes,
            pack=self.packed,
            capacity=schedule.policy.capacity,
            starts_together=schedule.policy.starts_together,
            overlaps=overlaps,
        )

    def collect_step(
        self, run: EpisodeRun, weight_version: int, may_go_on: Callable[[], bool] = lambda: True
    ) -> CollectedRollouts | None:
        """The samples of the next step, groups adjacent; None where `may_go_on` turned False before they were there."""
        with only_young_collections():
            with self.clock.phase("generation"):
                is_there = bool(run.collect(self.generator, weight_version, may_go_on))
                idle_s = run.collectors.idle_s()  # within the phase, of which it is a part
            self.clock.move("generation", "rewards", idle_s)
            if not is_there:
                return None
            results = run.results()
            self.note(run, results)
            rows = [(result.number, row) for result in results if (row := run.row(result)) is not None]
            return evolve(
                run.packed(),
                rows=[row for _, row in rows],
                reset_seeds=[run.plans.reset_seed(number) for number, _ in rows],
                data_sets=[str(row[DATA_SET]) for _, row in rows] if self.is_mixed else (),
            )

    def note(self, run: EpisodeRun, results: Sequence[GroupResult]) -> None:
        """Say what became of samples whose environment failed, and which prompts were too long."""
        if (num_long := sum(result.num_long for result in results)) and self.limit is not None:
            limit = f"{self.limit.max_tokens} tokens ({self.limit.option})"
            left = f"{self.purpose} has {sum(not result.is_left_out for result in results)} of {len(results)}"
            self.progress.note(f"{self.limit.key}: {num_long} prompts are left out: they have more than {limit}; {left}")
        size, failures = self.samples_per_prompt, run.failures
        if not failures.reasons:
            return
        numbers = [sample for result in results for sample in range(result.number * size, (result.number + 1) * size)]
        reasons = {sample: failures.reasons[sample] for sample in numbers if sample in failures.reasons}
        if reasons:
            num_samples = sum(result.num_samples for result in results)
            self.progress.note(str(evolve(failures, reasons=reasons, num_samples=num_samples, replaced={})))


_COLUMNS = (
    *(
        "length",
        "tokens",
        "logprobs",
        "versions",
        "valid",
        "truncated",
        "timed_out",
        "ending",
        "routed",
        "images",
        "ended_segments",
    ),
    *("rewards", "parts", "reward_components", "success", "finish_reason", "text", "num_generated", "metrics"),
)
_OF_EPISODE = attrgetter(*_COLUMNS)
_OF_PROCESS = ("generator", "episodes", "tokenizer", "tool_parser", "clock", "progress", "on_tokens", "processes")
"""Fields of EpisodeSampler that each process has for itself."""


@frozen(kw_only=True, eq=False)
class EpisodeSampler(StepSampler[EpisodeGroup]):
    """Episodes between generator and environment, turn after turn."""

    prompt_limit: PromptLimit
    max_turns: int
    max_turn_tokens: int | None = None
    episode_timeout_s: float | None = None
    masks_truncated: bool = False
    """True where episodes that a limit of tokens or turns cut off are masked."""
    history: History = "segment"
    """Handling of chat templates that would rewrite earlier messages."""
    routed_experts: bool = False
    """True where the batch is to say which experts the generator sent each token to."""
    on_tokens: OnTokens | None = None
    """Called with the tokens of each sample, int32 [length], and its images, as soon as they are all there."""
    processes: CollectorProcesses | None = None
    """Processes that collect the groups; None where this one does."""

    @property
    def limit(self) -> PromptLimit:
        """See StepSampler."""
        return self.prompt_limit

    def collectors(self, schedule: Schedule, plans: StepPlans, failures: MaskedFailures, *, overlaps: bool) -> Collectors:
        """See StepSampler: or other processes do."""
        if self.processes is None:
            return super().collectors(schedule, plans, failures, overlaps=overlaps)
        parts = RemoteParts(
            plans=plans,
            failures=failures,
            on_sampled=self.progress.samples,
            on_tokens=self.on_tokens,
            slowest=self.episodes.slowest,
        )
        options = RunOptions(
            sampler={one.name: getattr(self, one.name) for one in fields(EpisodeSampler) if one.name not in _OF_PROCESS},
            policy=schedule.policy,
            sends_tokens=self.on_tokens is not None,
        )
        return self.processes.open(options, parts, overlaps=overlaps)

    def work_of(self, schedule: Schedule, plans: StepPlans, failures: MaskedFailures) -> PromptGroups:
        """See StepSampler."""
        policy, group_size = schedule.policy, self.samples_per_prompt
        turns = self.make_turns(
            schedule,
            options=TurnOptions(
                sampling=self.sampling,
                max_turns=self.max_turns,
                history=self.history,
                tool_parser=self.tool_parser,
                timeout_s=self.episode_timeout_s,
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
            round_size=self.round_size,
            prompt_limit=self.prompt_limit,
            max_response_tokens=self.max_response_tokens,
            max_turn_tokens=self.max_turn_tokens,
            masks_truncated=self.masks_truncated,
            compares=self.compares,
            placeholder=(self.sampling.stop_token_ids or (0,))[0],
        )
        return self.make_groups(
            schedule, options=options, plans=plans, runner=self.episodes, turns=turns, tokenizer=self.tokenizer
        )

    def make_turns(self, schedule: Schedule, **options: Any) -> Turns:  # noqa: ARG002 - a replay has its schedule's
        """The turns of the episodes of a schedule."""
        return Turns(**options)

    def make_groups(self, schedule: Schedule, **options: Any) -> PromptGroups:  # noqa: ARG002 - likewise
        """The groups of a schedule."""
        return PromptGroups(**options)

    def packed(self, groups: Sequence[EpisodeGroup]) -> PackedGroups:
        """See StepSampler."""
        episodes = [episode for group in groups for episode in group.episodes]
        of = _columns(groups)
        starts, owner, offsets = offsets_of(of["length"]), *_segments(of["length"], of["ended_segments"])
        is_cut = len(owner) > len(episodes)
        tokens, logprobs, versions = (
            np.concatenate(list(chain.from_iterable(of[name]))) for name in ("tokens", "logprobs", "versions")
        )
        failed = ~np.array(of["valid"], np.bool_)
        truncated, timed_out = (np.array(of[name], np.bool_) for name in ("truncated", "timed_out"))
        valid = ~(failed | truncated) if self.masks_truncated else ~failed
        loss_mask = versions != NOT_GENERATED
        num_generated = np.array(of["num_generated"], np.int64)
        if is_cut:
            num_generated = np.add.reduceat(loss_mask, offsets[:-1], dtype=np.int64)
        if not valid.all():
            loss_mask = loss_mask & np.repeat(valid, np.diff(starts))
            logprobs = np.where(loss_mask, logprobs, np.float32(0.0))
        groups_of = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.episodes) for group in groups])
        batch = spi.TokenBatch(
            tokens=tokens,
            offsets=offsets,
            loss_mask=loss_mask,
            token_columns={
                spi.GENERATION_LOGPROBS: logprobs,
                spi.WEIGHT_VERSIONS: versions,
                **_routed_experts(of["routed"], starts),
            },
            sequence_columns={
                spi.GROUP_IDS: groups_of[owner],
                **({spi.EPISODE_IDS: owner.astype(np.int32)} if is_cut else {}),
            },
            sampling_mask=_sampling_mask(episodes, starts) if self.sampling_mask else None,
            images=tuple(of["images"][number] for number in owner.tolist()) if any(of["images"]) else None,
        )
        rewards = np.where(valid, np.array(list(map(sum, of["rewards"])), np.float64), 0.0).astype(np.float32)
        components = reward_components(of["reward_components"], valid)
        reported = _reported(of["metrics"], of["valid"], groups_of)
        if self.max_turns > 1:
            reported[SEGMENTS_PER_EPISODE] = np.bincount(owner, minlength=len(episodes)).astype(np.float64), groups_of
        rollouts = CollectedRollouts(
            batch=batch,
            rewards=rewards[owner],
            valid=valid[owner],
            reward_components={name: column[owner] for name, column in components.items()},
            finish_reasons=_finish_reasons(episodes) if is_cut else np.array(of["finish_reason"], np.uint8),
            success=(np.array(of["success"], np.bool_) & valid)[owner],
            responses=list(chain.from_iterable(one.segment_texts() for one in episodes)) if is_cut else of["text"],
            num_generated=num_generated,
            failed=failed[owner],
            truncated=truncated[owner],
            timed_out=timed_out[owner],
            failures=of["ending"],
            turns=_turns(episodes, starts) if self.max_turns > 1 or any(of["parts"]) else None,
        )
        return PackedGroups(rollouts=rollouts, reported=reported)


class Replay(Protocol):
    """A recorded run, which another repeats."""

    def sampler(self, sampler: EpisodeSampler) -> EpisodeSampler:
        """Return the sampler that repeats the recorded run, with the options of another."""

    def replaced(self, step: int) -> Mapping[int, GroupRewards]:
        """Return the rewards of the groups that the recorded run replaced before a step, counted from 1."""

    def difference(self, record: StepRecord) -> str | None:
        """Return why a step is no longer that of the recorded run; None where it is."""


def _columns(groups: Sequence[EpisodeGroup]) -> dict[str, list[Any]]:
    """Return the values of some groups' episodes under each of _COLUMNS. Group by group: all episodes are more than the
    processor's caches hold, and would have to come from memory for each column."""
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for group in groups:
        for column, values in zip(columns.values(), zip(*map(_OF_EPISODE, group.episodes), strict=True), strict=True):
            column.extend(values)
    return columns


def _segments(lengths: Sequence[int], ended: Sequence[Sequence[EndedSegment]]) -> tuple[Int64Array, Int64Array]:
    """Return the episode of each of N sequences, int64 [N], and their offsets, int64 [N+1]. `lengths` are those of episodes,
    `ended` their segments but the last one."""
    owner = np.repeat(np.arange(len(lengths)), [len(segments) + 1 for segments in ended])
    ends = [
        first + end
        for first, length, segments in zip(offsets_of(lengths).tolist(), lengths, ended, strict=False)
        for end in (*(segment.end for segment in segments), length)
    ]
    return owner, np.array([0, *ends], np.int64)


def _finish_reasons(episodes: Sequence[Episode]) -> UInt8Array:
    """uint8 [N]: why the last turn of each segment ended."""
    reasons = [(*(segment.finish_reason for segment in one.ended_segments), one.finish_reason) for one in episodes]
    return np.array(list(chain.from_iterable(reasons)), np.uint8)


def _routed_experts(routed: Sequence[Sequence[tuple[int, AnyArray]]], offsets: Int64Array) -> dict[str, AnyArray]:
    """The column ROUTED_EXPERTS, where it is wanted: of a token that several turns have read, what the last one reports."""
    if not any(routed):
        return {}
    shape = next(rows.shape[1:] for pieces in routed for _, rows in pieces)
    column = np.full((int(offsets[-1]), *shape), -1, np.int16)
    for pieces, start in zip(routed, offsets.tolist(), strict=False):
        for place, rows in pieces:
            target = column[start + place : start + place + len(rows)]
            np.copyto(target, rows, where=rows >= 0)
    return {spi.ROUTED_EXPERTS: column}


def _sampling_mask(episodes: Sequence[Episode], offsets: Int64Array) -> spi.SamplingMask:
    """Return the tokens that each token was chosen among; empty rows where it was read."""
    parts, end = [], 0
    for episode, first in zip(episodes, offsets.tolist(), strict=False):
        for start, mask in episode.masks:
            parts += [spi.SamplingMask.whole(first + start - end), mask]
            end = first + start + len(mask)
    return spi.SamplingMask.join([*parts, spi.SamplingMask.whole(int(offsets[-1]) - end)])


def _reported(
    metrics: Sequence[Sequence[tuple[str, float]]], valid: Sequence[bool], groups_of: Int32Array
) -> dict[str, tuple[NDArray[np.float64], Int32Array]]:
    """Return what valid episodes reported: one that failed in a later turn counts in none of its turns."""
    values: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for reported, group in compress(zip(metrics, groups_of.tolist(), strict=True), valid):
        for name, value in reported:
            values[name].append((value, group))
    found = {name: zip(*pairs, strict=True) for name, pairs in values.items()}
    return {name: (np.array(next(pairs), np.float64), np.array(next(pairs), np.int32)) for name, pairs in found.items()}


def _turns(episodes: Sequence[Episode], offsets: Int64Array) -> spi.TurnRewards:
    """Return the turn of each token, and the reward of each turn."""
    turn_of = np.full(int(offsets[-1]), -1, np.int32)
    parts = [list(episode.rewarded_parts()) for episode in episodes]
    for found, first in zip(parts, offsets.tolist(), strict=False):
        for number, (start, end, _, _) in enumerate(found):
            turn_of[first + start : first + end] = number
    continues = np.array([continues for found in parts for _, _, _, continues in found], np.bool_)
    return spi.TurnRewards(
        rewards=np.array([reward for found in parts for _, _, reward, _ in found], np.float32),
        offsets=offsets_of(list(map(len, parts))),
        turn_of=turn_of,
        continues=continues if continues.any() else None,
    )
