"""Rewarded samples of agents: each episode has a session, and each of the session's segments becomes a sequence."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.config.data import Split
from rlcore.run.protocols import CollectedRollouts
from rlcore.run.train_step.scorers import OnTokens
from rlcore.spi.arrays import offsets_of
from rlcore_rollout.environment_results import MaskedFailures
from rlcore_rollout.episode import NOT_GENERATED
from rlcore_rollout.episode_collector import EpisodeCollector
from rlcore_rollout.episode_group import reward_components
from rlcore_rollout.packed_groups import PackedGroups, Reported
from rlcore_rollout.sampler import SEGMENTS_PER_EPISODE, StepSampler
from rlcore_rollout.schedule import Schedule
from rlcore_rollout.step_plans import StepPlans
from rlcore_serve.agents.groups import AgentEpisode, AgentGroup, AgentGroups
from rlcore_serve.sessions.interface import Segment, SessionContext, SessionServer, session_server
from rlcore_serve.sessions.sampler import SessionSampler
from rlcore_serve.sessions.tools import SessionTools

MODEL_NAME = "policy"
"""The model's name for agents."""
_CUT = spi.EpisodeFailure(kind="limit", reason="its last answer was cut off")
_SAMPLING = (
    spi.capabilities.TOP_K,
    spi.capabilities.TOP_P,
    spi.capabilities.STOP_STRINGS,
    spi.capabilities.STRUCTURED_OUTPUT,
    spi.capabilities.TOKEN_STREAMING,
    spi.capabilities.PROMPT_LOGPROBS,
)


@frozen(kw_only=True, eq=False)
class AgentSampler(StepSampler[AgentGroup]):
    """Episodes that agents run. Seeds follow from those of the steps, the episode, and the order of its requests."""

    server: Callable[[SessionContext], SessionServer]
    """Builds the server of its sessions."""
    max_sequence_length: int
    history: Literal["segment", "refuse"]
    trains: bool
    """True where a run trains on the samples."""

    def work_of(self, schedule: Schedule, plans: StepPlans, failures: MaskedFailures) -> AgentGroups:
        """See StepSampler."""
        streams = self.generator.has(spi.capabilities.TOKEN_STREAMING)
        sampler = SessionSampler(self.tokenizer.decode, sampling_mask=self.sampling_mask, streams_tokens=streams)
        tools = SessionTools.of(self.tool_parser, self.tokenizer.chat_template)
        context = SessionContext(
            model_name=MODEL_NAME,
            tokenizer=self.tokenizer,
            sampler=sampler,
            sampling=self.sampling,
            max_tokens=self.max_response_tokens,
            max_sequence_length=self.max_sequence_length,
            capabilities=frozenset(name for name in _SAMPLING if self.generator.has(name)),
            vocab_size=self.episodes.vocab_size,
            history=self.history,
            parse_tool_calls=tools.parse,
            tool_form=tools.form,
            shows_tools=tools.is_in_template,
            keeps_kept=self.sampling_mask or not self.trains,
            note=self.progress.note,
        )
        return AgentGroups(
            server=self.server(context),
            sampler=sampler,
            compares=self.compares,
            plans=plans,
            runner=self.episodes,
            failures=failures,
            group_size=self.samples_per_prompt,
            groups_per_step=schedule.policy.groups_per_step,
            on_ended=self.progress.samples,
        )

    def packed(self, groups: Sequence[AgentGroup]) -> PackedGroups:
        """See StepSampler: the sequences of all episodes; one without an answer has a single token, outside the loss."""
        episodes = [episode for group in groups for episode in group.episodes]
        silent = _silent((self.sampling.stop_token_ids or (0,))[0])
        found = [(number, segment) for number, episode in enumerate(episodes) for segment in episode.segments or (silent,)]
        segments, numbers = [segment for _, segment in found], np.array([number for number, _ in found], np.int32)
        results = [episodes[number].result or spi.EpisodeResult(reward=0.0) for number in numbers]
        valid = np.array([episodes[number].result is not None for number in numbers], np.bool_)
        endings = [_ending(episode) for episode in episodes]
        at_limit = np.array([ending is not None and ending.kind == "limit" for ending in endings], np.bool_)
        offsets = offsets_of([len(segment.tokens) for segment in segments])
        mask = np.concatenate([segment.loss_mask for segment in segments]) & np.repeat(valid, np.diff(offsets))
        logprobs = np.concatenate([segment.logprobs for segment in segments])
        batch = spi.TokenBatch(
            tokens=np.concatenate([segment.tokens for segment in segments]),
            offsets=offsets,
            loss_mask=mask,
            token_columns={
                spi.GENERATION_LOGPROBS: np.where(mask, logprobs, np.float32(0.0)),
                spi.WEIGHT_VERSIONS: np.concatenate([segment.weight_versions for segment in segments]),
            },
            sequence_columns={
                spi.GROUP_IDS: numbers // np.int32(self.samples_per_prompt),
                spi.EPISODE_IDS: numbers,
            },
            sampling_mask=spi.SamplingMask.join([one.sampling_mask for one in segments]) if self.sampling_mask else None,
        )
        rollouts = CollectedRollouts(
            batch=batch,
            rewards=np.array([result.reward for result in results], np.float32),
            valid=valid,
            reward_components=reward_components([result.reward_components for result in results], valid),
            finish_reasons=np.array([segment.finish_reason for segment in segments], np.uint8),
            success=np.array([result.success for result in results], np.bool_),
            responses=[segment.text for segment in segments],
            num_generated=np.array([int(segment.loss_mask.sum()) for segment in segments], np.int64),
            failed=~valid,
            timed_out=np.zeros(len(valid), np.bool_),
            truncated=np.array([segment.finish_reason is spi.FinishReason.LENGTH for segment in segments], np.bool_)
            | (at_limit[numbers] & valid),
            failures=endings,
        )
        return PackedGroups(rollouts=rollouts, reported=_reported(episodes, self.samples_per_prompt))


class AgentCollector(EpisodeCollector):
    """Collects the samples of a run whose environment declares `agent`."""

    def build(self, split: Split, on_tokens: OnTokens | None, **parts: Any) -> AgentSampler:  # noqa: ARG002 - of segments
        """See EpisodeCollector."""
        rollout = self.plan.recipe.rollout
        return AgentSampler(
            server=session_server,
            max_sequence_length=rollout.max_sequence_length,
            history="refuse" if rollout.history == "refuse" else "segment",
            trains=split == "train",
            **parts,
        )


def _ending(episode: AgentEpisode) -> spi.EpisodeFailure | None:
    """Return how an episode ended; at a limit also where the last answer was cut off and nobody says more."""
    is_cut = bool(episode.segments) and episode.segments[-1].finish_reason is spi.FinishReason.LENGTH
    return episode.failure or (_CUT if is_cut else None)


def _silent(token: int) -> Segment:
    """The sequence of an episode that never asked the policy."""
    return Segment(
        tokens=np.array([token], np.int32),
        loss_mask=np.zeros(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        weight_versions=np.full(1, NOT_GENERATED, np.int32),
        finish_reason=spi.FinishReason.ABORTED,
        text="",
        sampling_mask=spi.SamplingMask.whole(1),
    )


def _reported(episodes: Sequence[AgentEpisode], group_size: int) -> Reported:
    """Return what valid episodes report, and how many segments each episode has."""
    values: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for number, episode in enumerate(episodes):
        for name, value in () if episode.result is None else episode.result.metrics.items():
            values[name].append((value, number // group_size))
        values[SEGMENTS_PER_EPISODE].append((len(episode.segments), number // group_size))
    return {
        name: (np.array([value for value, _ in found], np.float64), np.array([group for _, group in found], np.int32))
        for name, found in values.items()
    }
