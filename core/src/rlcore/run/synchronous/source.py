"""The source of a synchronous run: all episodes of a step at once, turn by turn, with the present weights.

It knows prompts and observations as text, tokens or a chat's first messages. Images, tools, agents, time limits and whatever
overlaps with training need an installed collector.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
from attrs import define, field, frozen

from rlcore import spi
from rlcore.run.data.prompt_stream import PromptOrder, RandomPurpose
from rlcore.run.protocols import CollectedRollouts, Source, always
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import Tokenizer
from rlcore.spi.arrays import Int64Array, offsets_of
from rlcore.spi.execution import GeneratorGroup, Responses

ResultT = TypeVar("ResultT")
READ = -1
"""The weight version of a token that the policy has read."""
NUM_SEEDS = 2**62


@define(kw_only=True, eq=False)
class _Episode:
    """A sample, as far as it is."""

    state: Any
    num_prompt_tokens: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    """The weight version that sampled each token; READ for the others."""
    text: str = ""
    reward: float = 0.0
    components: dict[str, float] = field(factory=dict)
    metrics: list[tuple[str, float]] = field(factory=list)
    num_turns: int = 0
    success: bool = False
    finish_reason: int = spi.FinishReason.STOP
    ended: bool = False
    truncated: bool = False

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens of the environment's."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [READ] * len(tokens)


class _OneRequest:
    """The feed of a stream that brings one request."""

    def __init__(self, request: spi.GenerateRequest) -> None:
        self._requests, self.num_missing = [request], len(request.seeds)
        self.parts: list[tuple[Int64Array, Responses]] = []

    def take(self, *, wait: bool) -> Sequence[spi.GenerateRequest] | None:  # noqa: ARG002 - nothing comes later
        """See ResponseFeed."""
        taken, self._requests = self._requests, []
        return taken if taken or self.num_missing else None

    def deliver(self, samples: Int64Array, responses: Responses) -> None:
        """See ResponseFeed."""
        self.parts.append((samples, responses))
        self.num_missing -= len(samples)

    def end(self) -> None:
        """See ResponseFeed."""
        self.num_missing = 0


@frozen(kw_only=True, eq=False)
class SynchronousSource(Source):
    """Rewarded samples of the present policy: a function of seed, step and weights."""

    generates = True
    generator: GeneratorGroup
    environment: spi.Environment
    tokenizer: Tokenizer
    rows: Sequence[spi.Row]
    order: PromptOrder
    sampling: spi.SamplingParams
    samples_per_prompt: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_turns: int
    seed: int
    clock: PhaseClock
    _runner: asyncio.Runner = field(init=False, factory=asyncio.Runner)

    def sample(
        self,
        step: int,
        weight_version: int,
        may_go_on: Callable[[], bool] = always,  # noqa: ARG002 - a signal ends it at once
    ) -> CollectedRollouts:
        """See Source."""
        random = np.random.default_rng([self.seed, RandomPurpose.ROLLOUTS, step])
        rows = [self.rows[int(index)] for index in self.order.indices(step - 1)]
        with self.clock.phase("rewards"):
            episodes = self._run(self._begin(rows, random.integers(NUM_SEEDS, size=len(rows)).tolist()))
        while open_ones := [episode for episode in episodes if not episode.ended]:
            seeds = random.integers(NUM_SEEDS, size=len(open_ones))
            with self.clock.phase("generation"):
                turns = self._generate(open_ones, seeds, weight_version)
            with self.clock.phase("rewards"):
                self._run(self._answer(open_ones, turns))
        return _packed(episodes, self.samples_per_prompt, weight_version)

    def close(self) -> None:
        """See Source."""
        self._runner.close()

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self._runner.run(work)

    async def _begin(self, rows: Sequence[spi.Row], seeds: Sequence[int]) -> list[_Episode]:
        """The episodes of a step: the samples of a group start from one reset."""
        pairs = zip(rows, seeds, strict=True)
        results = await asyncio.gather(*(self.environment.reset(row, seed) for row, seed in pairs))
        episodes = []
        for result in results:
            prompt = self._prompt(result.observation)
            if len(prompt) > self.max_prompt_tokens:
                expected = f"at most {self.max_prompt_tokens} (rollout.max_prompt_tokens)"
                raise spi.DataError(f"found a prompt of {len(prompt)} tokens; expected {expected}. Shorten it, or raise that")
            for _ in range(self.samples_per_prompt):
                episode = _Episode(state=result.state, num_prompt_tokens=len(prompt), tokens=[], logprobs=[], versions=[])
                episode.read(prompt)
                episodes.append(episode)
        return episodes

    def _prompt(self, observation: spi.Observation) -> list[int]:
        if observation.messages is not None:
            return self.tokenizer.encode(self.tokenizer.render_chat(observation.messages, ()))
        if observation.text is not None:
            return [*self.tokenizer.prompt_prefix, *self.tokenizer.encode(observation.text)]
        return self._behind(observation)

    def _behind(self, observation: spi.Observation) -> list[int]:
        """Return the tokens that follow a turn."""
        if observation.text is not None:
            return self.tokenizer.encode_behind([observation.text])[0]
        if observation.tokens is None:
            raise spi.ContractError("found messages behind a turn; expected text or tokens, which the synchronous source knows")
        found: list[int] = observation.tokens.tolist()
        return found

    def _generate(self, episodes: Sequence[_Episode], seeds: Int64Array, weight_version: int) -> list[spi.Turn]:
        """The next turn of each episode."""
        room = [self._room(episode) for episode in episodes]
        feed = _OneRequest(
            spi.GenerateRequest(
                prompts=spi.RaggedTokens.from_lists([episode.tokens for episode in episodes]),
                num_samples=1,
                seeds=seeds,
                max_tokens=np.array(room, np.int32),
                sampling=self.sampling,
                weight_version=weight_version,
            )
        )
        self.generator.stream(feed, weight_version)
        turns: dict[int, spi.Turn] = {}
        for samples, responses in feed.parts:
            result, offsets = responses.result, responses.result.offsets
            for place, sample in enumerate(samples.tolist()):
                part, episode = slice(int(offsets[place]), int(offsets[place + 1])), episodes[sample]
                tokens, reason = result.tokens[part], spi.FinishReason(int(result.finish_reasons[place]))
                episode.tokens += tokens.tolist()
                episode.logprobs += result.logprobs[part].tolist()
                episode.versions += result.weight_versions[part].tolist()
                episode.finish_reason = reason
                turns[sample] = spi.Turn(text=responses.texts[place], tokens=tokens, finish_reason=reason)
        return [turns[number] for number in range(len(episodes))]

    def _room(self, episode: _Episode) -> int:
        """Tokens that may follow."""
        return self.max_response_tokens + episode.num_prompt_tokens - len(episode.tokens)

    async def _answer(self, episodes: Sequence[_Episode], turns: Sequence[spi.Turn]) -> None:
        """The environment's answer to the turns."""
        pairs = zip(episodes, turns, strict=True)
        results = await asyncio.gather(*(self.environment.step(episode.state, turn) for episode, turn in pairs))
        for episode, turn, result in zip(episodes, turns, results, strict=True):
            if result.failure is not None and not result.failure.is_trained:
                raise spi.RewardError(f"the environment returned {result.failure}; the synchronous source masks no sample")
            episode.state, episode.success, episode.ended = result.state, result.success, result.done
            episode.text, episode.num_turns = episode.text + turn.text, episode.num_turns + 1
            episode.reward += result.reward
            episode.metrics += result.metrics.items()
            for name, value in result.reward_components.items():
                episode.components[name] = episode.components.get(name, 0.0) + value
            episode.truncated = turn.finish_reason == spi.FinishReason.LENGTH
            if result.observation is not None:
                tokens = self._behind(result.observation)
                if episode.num_turns == self.max_turns or len(tokens) >= self._room(episode):
                    episode.ended = episode.truncated = True
                else:
                    episode.read(tokens)


def _packed(episodes: Sequence[_Episode], group_size: int, weight_version: int) -> CollectedRollouts:
    """The samples of a step, groups adjacent."""
    versions = np.concatenate([np.array(episode.versions, np.int32) for episode in episodes])
    count, names = len(episodes), sorted({name for episode in episodes for name in episode.components})
    batch = spi.TokenBatch(
        tokens=np.concatenate([np.array(episode.tokens, np.int32) for episode in episodes]),
        offsets=offsets_of([len(episode.tokens) for episode in episodes]),
        loss_mask=versions != READ,
        token_columns={
            spi.GENERATION_LOGPROBS: np.concatenate([np.array(episode.logprobs, np.float32) for episode in episodes]),
            spi.WEIGHT_VERSIONS: versions,
        },
        sequence_columns={spi.GROUP_IDS: np.arange(count, dtype=np.int32) // group_size},
    )
    metrics: dict[str, list[float]] = {}
    for name, value in (pair for episode in episodes for pair in episode.metrics):
        metrics.setdefault(name, []).append(value)
    return CollectedRollouts(
        batch=batch,
        weight_version=weight_version,
        rewards=np.array([episode.reward for episode in episodes], np.float32),
        reward_components={
            name: np.array([episode.components.get(name, 0.0) for episode in episodes], np.float32) for name in names
        },
        valid=np.ones(count, np.bool_),
        finish_reasons=np.array([episode.finish_reason for episode in episodes], np.uint8),
        success=np.array([episode.success for episode in episodes], np.bool_),
        responses=[episode.text for episode in episodes],
        num_generated=np.array([sum(version != READ for version in episode.versions) for episode in episodes], np.int64),
        environment_metrics={name: float(np.mean(values)) for name, values in metrics.items()},
        failed=np.zeros(count, np.bool_),
        timed_out=np.zeros(count, np.bool_),
        truncated=np.array([episode.truncated for episode in episodes], np.bool_),
    )
