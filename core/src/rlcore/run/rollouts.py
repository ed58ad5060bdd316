"""From prompts to rewarded samples: turns between generator and environment, packed into one batch."""

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import field, frozen

from rlcore.run.episodes import EpisodeRunner, Failure
from rlcore.run.groups import GeneratorGroup
from rlcore.run.progress import Progress
from rlcore.run.prompts import encode_prompts
from rlcore.run.timing import PhaseClock
from rlcore.run.tokenizer import Tokenizer
from rlcore.spi import (
    GENERATION_LOGPROBS,
    GROUP_IDS,
    WEIGHT_VERSIONS,
    DataError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Observation,
    RaggedTokens,
    RolloutBatch,
    Row,
    SamplingParams,
    TokenBatch,
    Turn,
    capabilities,
)
from rlcore.spi.arrays import AnyArray, BoolArray, Float32Array, Int32Array, Int64Array, gather_ragged, take_rows

NOT_GENERATED = -1
"""The weight version of a token that the policy did not say."""
_REASONS = {int(reason): reason for reason in FinishReason}


@frozen(kw_only=True, eq=False)
class CollectedRollouts:
    """A step's samples, and what the run directory and the metrics tell of them."""

    rollouts: RolloutBatch
    success: BoolArray
    """bool [N]: whether the environment called the task solved."""
    responses: Sequence[str]
    """[N]: the text of all turns of the policy."""
    num_generated: Int64Array
    """int64 [N]: tokens that the policy generated."""
    environment_metrics: Mapping[str, float] = field(factory=dict)
    """Means over the episodes that report them."""


@frozen(kw_only=True, eq=False)
class _Piece:
    """Tokens of several episodes, appended to each at the same moment; generated ones carry their columns."""

    episodes: Int64Array
    tokens: Int32Array
    offsets: Int64Array
    result: GenerateResult | None

    def columns(self) -> tuple[Float32Array, Int32Array]:
        """Log-probabilities and weight versions."""
        if self.result is None:
            return np.zeros(len(self.tokens), np.float32), np.full(len(self.tokens), NOT_GENERATED, np.int32)
        return self.result.logprobs, self.result.weight_versions


@frozen(kw_only=True, eq=False)
class RolloutCollector:
    """Runs the episodes of one step. Every random choice follows from the seed given to `collect`."""

    generator: GeneratorGroup
    episodes: EpisodeRunner
    tokenizer: Tokenizer
    sampling: SamplingParams
    samples_per_prompt: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_turns: int
    clock: PhaseClock
    progress: Progress

    def collect(self, rows: Sequence[Row], weight_version: int, seed: Sequence[int]) -> CollectedRollouts:
        """`samples_per_prompt` episodes of each row, adjacent. `seed` is a key of numpy's SeedSequence."""
        return _Collection(self, rows, weight_version, seed).run()


class _Collection:
    """The state of one `collect` call: N = rows · samples_per_prompt episodes."""

    def __init__(self, collector: RolloutCollector, rows: Sequence[Row], weight_version: int, seed: Sequence[int]) -> None:
        self.c = collector
        self.rows = rows
        self.weight_version = weight_version
        self.random = np.random.default_rng(list(seed))
        num_episodes = len(rows) * collector.samples_per_prompt
        self.rewards = np.zeros(num_episodes, np.float64)
        self.success = np.zeros(num_episodes, np.bool_)
        self.valid = np.ones(num_episodes, np.bool_)
        self.finish_reasons = np.full(num_episodes, FinishReason.ABORTED, np.uint8)
        self.budget = np.full(num_episodes, collector.max_response_tokens, np.int64)
        self.num_generated = np.zeros(num_episodes, np.int64)
        self.texts: list[list[str]] = [[] for _ in range(num_episodes)]
        self.states: list[Any] = [None] * num_episodes
        self.metric_sums: dict[str, list[float]] = {}
        self.pieces: list[_Piece] = []

    def run(self) -> CollectedRollouts:
        active, prompts = self._reset()
        for turn in range(self.c.max_turns):
            result = self._generate(prompts, active, num_samples=self.c.samples_per_prompt if turn == 0 else 1)
            self.pieces.append(_Piece(episodes=active, tokens=result.tokens, offsets=result.offsets, result=result))
            going = self._step(active, result)
            # An episode goes on where the environment says so and at least one token can still be generated.
            open_ = [(index, obs) for index, obs in going if len(obs) < self.budget[index]]
            if not open_ or turn + 1 == self.c.max_turns:
                break
            active = np.asarray([index for index, _ in open_], np.int64)
            observed = RaggedTokens.from_lists([obs.tolist() for _, obs in open_])
            self.budget[active] -= observed.lengths
            self.pieces.append(_Piece(episodes=active, tokens=observed.tokens, offsets=observed.offsets, result=None))
            prompts = self._contexts(active)
        return self._collected()

    def _reset(self) -> tuple[Int64Array, RaggedTokens]:
        """Begin one episode a row; its samples share the prompt. Returns all episodes and the P prompts."""
        seeds = self.random.integers(0, 2**31, len(self.rows)).tolist()
        with self.c.clock.phase("rewards"):
            resets = self.c.episodes.reset_all(self.rows, seeds)
        group = self.c.samples_per_prompt
        observations = []
        for index, reset in enumerate(resets):
            members = slice(index * group, (index + 1) * group)
            if isinstance(reset, Failure):
                self.valid[members] = False
                observations.append(self._placeholder())
            else:
                self.states[members] = [reset.state] * group
                observations.append(reset.observation)
        packed = RaggedTokens.from_lists(encode_prompts(observations, self.c.tokenizer))
        self._check_lengths(packed)
        episodes = np.arange(len(self.rows) * group, dtype=np.int64)
        shared = np.repeat(np.arange(len(self.rows)), group)
        offsets = np.zeros(len(shared) + 1, np.int64)
        np.cumsum(packed.lengths[shared], out=offsets[1:])
        tokens = take_rows(packed.tokens, packed.offsets, shared)
        self.pieces.append(_Piece(episodes=episodes, tokens=tokens, offsets=offsets, result=None))
        return episodes, packed

    def _check_lengths(self, prompts: RaggedTokens) -> None:
        longest = int(prompts.lengths.argmax())
        if prompts.lengths[longest] > self.c.max_prompt_tokens:
            raise DataError(
                f"the environment's prompt for row {self.rows[longest]!r:.200} has {prompts.lengths[longest]} tokens; expected "
                f"at most {self.c.max_prompt_tokens} (rollout.max_prompt_tokens). Raise it, or leave such rows out"
            )

    def _placeholder(self) -> Observation:
        """A prompt for a row whose reset failed: its samples are masked, but a generator needs some token."""
        return Observation(tokens=np.asarray(self.c.sampling.stop_token_ids[:1] or (0,), np.int32))

    def _encode(self, observation: Observation) -> Int32Array:
        """Tokens of what the policy reads after its first turn."""
        if observation.tokens is not None:
            return observation.tokens
        if observation.text is not None:
            return np.asarray(self.c.tokenizer.encode(observation.text), np.int32)
        return np.asarray(self.c.tokenizer.apply_chat_template(observation.messages or ()), np.int32)

    def _generate(self, prompts: RaggedTokens, active: Int64Array, num_samples: int) -> GenerateResult:
        request = GenerateRequest(
            prompts=prompts,
            num_samples=num_samples,
            seeds=self.random.integers(0, 2**63 - 1, len(active), dtype=np.int64),
            max_tokens=self.budget[active].astype(np.int32),
            sampling=self.c.sampling,
            weight_version=self.weight_version,
            on_finished=self._counter(len(active)) if self.c.generator.has(capabilities.STREAMING) else None,
        )
        with self.c.clock.phase("generation"):
            return self.c.generator.generate(request)

    def _counter(self, num_samples: int) -> Callable[[int, GenerateResult], None]:
        """Tells the display how many samples have ended."""
        lock, num_finished = threading.Lock(), 0

        def count(sample: int, result: GenerateResult) -> None:  # noqa: ARG001 - what a generator hands out
            nonlocal num_finished
            with lock:
                num_finished += 1
                self.c.progress.samples(num_finished, num_samples)

        return count

    def _step(self, active: Int64Array, result: GenerateResult) -> list[tuple[int, Int32Array]]:
        """Score a turn of each active episode; returns those that go on, with the tokens they read next."""
        lengths = np.diff(result.offsets)
        self.budget[active] -= lengths
        self.num_generated[active] += lengths
        self.finish_reasons[active] = result.finish_reasons
        turns = self._turns(result)
        for index, turn in zip(active.tolist(), turns, strict=True):
            self.texts[index].append(turn.text)
        alive = np.flatnonzero(self.valid[active])
        indices = active[alive].tolist()
        with self.c.clock.phase("rewards"):
            answers = self.c.episodes.step_all(
                [self.states[index] for index in indices], [turns[position] for position in alive.tolist()]
            )
        going = []
        for index, answer in zip(indices, answers, strict=True):
            if isinstance(answer, Failure):
                self.valid[index] = False
                continue
            self.rewards[index] += answer.reward
            self.success[index] = answer.success
            self.states[index] = answer.state
            for name, value in answer.metrics.items():
                self.metric_sums.setdefault(name, []).append(value)
            if answer.observation is not None and not answer.done:
                going.append((index, self._encode(answer.observation)))
        return going

    def _turns(self, result: GenerateResult) -> list[Turn]:
        bounds = result.offsets.tolist()
        tokens = [result.tokens[start:end] for start, end in pairwise(bounds)]
        texts = self.c.tokenizer.decode_batch(tokens)
        reasons = [_REASONS[reason] for reason in result.finish_reasons.tolist()]
        return [
            Turn(text=text, tokens=part, finish_reason=reason)
            for text, part, reason in zip(texts, tokens, reasons, strict=True)
        ]

    def _contexts(self, active: Int64Array) -> RaggedTokens:
        """What each active episode has said and read so far."""
        tokens, offsets, _ = self._assemble()
        gather, taken = gather_ragged(offsets, active)
        return RaggedTokens(tokens=tokens[gather], offsets=taken)

    def _assemble(self) -> tuple[Int32Array, Int64Array, list[AnyArray]]:
        """All pieces by episode, in the order they were said: tokens, offsets, and their columns."""
        episode = np.concatenate([piece.episodes for piece in self.pieces])
        lengths = np.concatenate([np.diff(piece.offsets) for piece in self.pieces])
        starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        order = np.argsort(episode, kind="stable")
        offsets = np.zeros(len(self.rewards) + 1, np.int64)
        np.cumsum(np.bincount(episode, weights=lengths, minlength=len(self.rewards)).astype(np.int64), out=offsets[1:])
        columns = zip(*((piece.tokens, *piece.columns()) for piece in self.pieces), strict=True)
        tokens, *taken = [take_rows(np.concatenate(column), starts, order) for column in columns]
        return tokens, offsets, taken

    def _collected(self) -> CollectedRollouts:
        tokens, offsets, (logprobs, versions) = self._assemble()
        loss_mask = versions != NOT_GENERATED
        if not self.valid.all():
            loss_mask = loss_mask & np.repeat(self.valid, np.diff(offsets))
            logprobs = np.where(loss_mask, logprobs, np.float32(0.0))
        group_ids = np.repeat(np.arange(len(self.rows), dtype=np.int32), self.c.samples_per_prompt)
        batch = TokenBatch(
            tokens=tokens,
            offsets=offsets,
            loss_mask=loss_mask,
            token_columns={GENERATION_LOGPROBS: logprobs, WEIGHT_VERSIONS: versions},
            sequence_columns={GROUP_IDS: group_ids},
        )
        rollouts = RolloutBatch(
            batch=batch,
            rewards=np.where(self.valid, self.rewards, 0.0).astype(np.float32),
            group_ids=group_ids,
            valid=self.valid,
            finish_reasons=self.finish_reasons,
        )
        return CollectedRollouts(
            rollouts=rollouts,
            success=self.success & self.valid,
            responses=["".join(texts) for texts in self.texts],
            num_generated=self.num_generated,
            environment_metrics={name: float(np.mean(values)) for name, values in self.metric_sums.items()},
        )
