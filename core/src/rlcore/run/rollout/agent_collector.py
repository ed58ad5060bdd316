"""Rewarded samples of agents: each episode has a session, and each of the session's segments becomes a sequence."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.chat.tool_calls import ToolParser
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.protocols import CollectedRollouts, GeneratorGroup
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.agent_run import AgentEpisode, AgentRun
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.masked_failures import MaskedFailures
from rlcore.run.rollout.session_sampler import SessionSampler
from rlcore.sessions.record import NOT_GENERATED, Segment
from rlcore.sessions.served_model import History, ServedModel
from rlcore.sessions.server import serving
from rlcore.sessions.session import Session, Sessions
from rlcore.spi.arrays import offsets_of

MODEL_NAME = "policy"
"""What agents call the model."""
_SAMPLING = (spi.capabilities.TOP_K, spi.capabilities.TOP_P, spi.capabilities.STOP_STRINGS)


@frozen(kw_only=True, eq=False)
class AgentCollector:
    """Runs the episodes of one step. Seeds follow from that of `collect`, the episode, and the order of its requests."""

    generator: GeneratorGroup
    episodes: EpisodeRunner
    tokenizer: Tokenizer
    sampling: spi.SamplingParams
    samples_per_prompt: int
    max_sequence_length: int
    max_response_tokens: int
    """Most tokens of one answer."""
    max_failed_fraction: float
    history: History
    tool_parser: ToolParser | None
    """Reads the calls of tools; None where their form is not known."""
    purpose: str
    """What the samples are for, in words."""
    clock: PhaseClock
    progress: Progress

    def collect(
        self,
        rows: Sequence[spi.Row],
        weight_version: int,
        seed: Sequence[int],
        spare: Iterable[spi.Row] = (),  # noqa: ARG002 - no prompt is known to be too long before its episode runs
    ) -> CollectedRollouts:
        """`samples_per_prompt` episodes of each row, adjacent. `seed` is a key of numpy's SeedSequence."""
        seeds = np.random.default_rng(list(seed)).integers(0, 2**31, len(rows)).tolist()
        members = [place for place in range(len(rows)) for _ in range(self.samples_per_prompt)]
        episodes = [AgentEpisode(number=number, row=rows[place], seed=seeds[place]) for number, place in enumerate(members)]
        failures = MaskedFailures(num_samples=len(episodes), of=self.purpose, max_fraction=self.max_failed_fraction)
        with self.clock.phase("generation"):
            self._run(episodes, failures, weight_version, tuple(seed))
        if failures.reasons:
            self.progress.note(str(failures))
        return self._collected(episodes)

    def _run(
        self, episodes: Sequence[AgentEpisode], failures: MaskedFailures, weight_version: int, seed: tuple[int, ...]
    ) -> None:
        sampler, sessions = SessionSampler(), Sessions()
        model = ServedModel(
            name=MODEL_NAME,
            tokenizer=self.tokenizer,
            sampler=sampler,
            max_sequence_length=self.max_sequence_length,
            sampling=self.sampling,
            capabilities=frozenset(name for name in _SAMPLING if self.generator.has(name)),
            vocab_size=self.episodes.vocab_size,
            history=self.history,
            parser=self.tool_parser,
        )
        with serving(model, sessions) as address:

            def open_session(episode: AgentEpisode) -> tuple[Session, spi.SessionEndpoint]:
                session = sessions.open(
                    seed=(*seed, episode.number), sampling=self.sampling, max_tokens=self.max_response_tokens
                )
                base_url = f"{address}/{session.token}/v1"
                return session, spi.SessionEndpoint(base_url=base_url, api_key=session.token, model=MODEL_NAME)

            AgentRun(
                episodes=episodes,
                runner=self.episodes,
                failures=failures,
                sampler=sampler,
                open_session=open_session,
                finish_session=sessions.finish,
                on_ended=lambda number: self.progress.samples(number, len(episodes)),
            ).run(self.generator, weight_version)

    def _collected(self, episodes: Sequence[AgentEpisode]) -> CollectedRollouts:
        """The sequences of all episodes; one without an answer has a single token, outside the loss."""
        silent = _silent((self.sampling.stop_token_ids or (0,))[0])
        found = [(episode, segment) for episode in episodes for segment in episode.segments or (silent,)]
        segments, owners = [segment for _, segment in found], [episode for episode, _ in found]
        results = [episode.result or spi.EpisodeResult(reward=0.0) for episode in owners]
        valid = np.array([episode.result is not None for episode in owners], np.bool_)
        offsets = offsets_of([len(segment.tokens) for segment in segments])
        mask = np.concatenate([segment.loss_mask for segment in segments]) & np.repeat(valid, np.diff(offsets))
        logprobs = np.concatenate([segment.logprobs for segment in segments])
        numbers = np.array([episode.number for episode in owners], np.int32)
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
        )
        return CollectedRollouts(
            batch=batch,
            rewards=np.array([result.reward for result in results], np.float32),
            valid=valid,
            finish_reasons=np.array([segment.finish_reason for segment in segments], np.uint8),
            success=np.array([result.success for result in results], np.bool_),
            responses=[segment.text for segment in segments],
            num_generated=np.array([int(segment.loss_mask.sum()) for segment in segments], np.int64),
            environment_metrics=_means(episodes),
            failed=~valid,
            timed_out=np.zeros(len(valid), np.bool_),
            truncated=np.array([segment.finish_reason is spi.FinishReason.LENGTH for segment in segments], np.bool_),
        )


def _silent(token: int) -> Segment:
    """The sequence of an episode that never asked the policy."""
    return Segment(
        tokens=np.array([token], np.int32),
        loss_mask=np.zeros(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        weight_versions=np.full(1, NOT_GENERATED, np.int32),
        finish_reason=spi.FinishReason.ABORTED,
        text="",
    )


def _means(episodes: Sequence[AgentEpisode]) -> dict[str, float]:
    """Means over the valid episodes that report a metric, and how many sequences an episode has."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.result is not None:
            for name, value in episode.result.metrics.items():
                values[name].append(value)
    means = {name: float(np.mean(found)) for name, found in values.items()}
    return means | {"sequences_per_episode": float(np.mean([len(episode.segments) for episode in episodes]))}
