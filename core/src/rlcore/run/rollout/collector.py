"""Rewarded samples of prompts: turns between generator and environment, packed into one batch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.protocols import CollectedRollouts, GeneratorGroup, Responses
from rlcore.run.report.progress import Progress, finished_counter
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.conversation import Conversations
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.episode_failure import Failure
from rlcore.run.rollout.episode_starts import EpisodeStarts, PromptLimit
from rlcore.run.rollout.gc_tuning import only_young_collections
from rlcore.run.rollout.masked_failures import MaskedFailures
from rlcore.spi.arrays import AnyArray, Float32Array, Int32Array, Int64Array, join_rows, offsets_of, take_rows

NOT_GENERATED = -1
"""The weight version of a token that the policy did not say."""


@frozen(kw_only=True, eq=False)
class RolloutCollector:
    """Runs the episodes of one step. Every random choice follows from the seed given to `collect`."""

    generator: GeneratorGroup
    episodes: EpisodeRunner
    tokenizer: Tokenizer
    sampling: spi.SamplingParams
    samples_per_prompt: int
    prompt_limit: PromptLimit
    max_response_tokens: int
    max_turns: int
    max_failed_fraction: float
    """The largest share of the samples that may be masked, since their environment failed."""
    purpose: str = "the step"
    """What the samples are for, in words."""
    routed_experts: bool = False
    """Whether the batch is to say which experts the generator sent each token to."""
    clock: PhaseClock
    progress: Progress

    def collect(
        self, rows: Sequence[spi.Row], weight_version: int, seed: Sequence[int], spare: Iterable[spi.Row] = ()
    ) -> CollectedRollouts:
        """`samples_per_prompt` episodes of each row, adjacent. A row whose prompt is over the limit is replaced by one of
        `spare`, or else left out, where the recipe says so. `seed` is a key of numpy's SeedSequence."""
        with only_young_collections():
            random = np.random.default_rng(list(seed))
            return _Collection(self, self._begin(rows, spare, random), weight_version, random, len(rows)).run()

    def _begin(self, rows: Sequence[spi.Row], spare: Iterable[spi.Row], random: np.random.Generator) -> EpisodeStarts:
        """Begin one episode a row; its samples share the prompt."""
        seeds = random.integers(0, 2**31, len(rows)).tolist()

        def reset(at: Mapping[int, spi.Row]) -> Sequence[spi.ResetResult | Failure]:
            with self.clock.phase("rewards"):
                return self.episodes.reset_all(list(at.values()), [seeds[place] for place in at])

        placeholder = (self.sampling.stop_token_ids or (0,))[0]
        starts = EpisodeStarts.of(rows, spare, reset, self.tokenizer, self.prompt_limit, placeholder)
        if starts.num_long:
            limit = f"{self.prompt_limit.max_tokens} tokens (rollout.max_prompt_tokens)"
            left = f"{self.purpose} has {len(starts.rows)} of {len(rows)}"
            self.progress.note(
                f"{self.prompt_limit.key}: {starts.num_long} prompts are left out: they have more than {limit}; {left}"
            )
        return starts


class _Collection:
    """The state of one `collect` call: N = rows · samples_per_prompt episodes."""

    def __init__(
        self,
        collector: RolloutCollector,
        starts: EpisodeStarts,
        weight_version: int,
        random: np.random.Generator,
        num_asked: int,
    ) -> None:
        """`num_asked`: the rows that were asked for, of which some may have been left out."""
        self.c = collector
        self.starts = starts
        self.num_asked = num_asked
        self.weight_version = weight_version
        self.random = random
        num_episodes = len(starts.rows) * collector.samples_per_prompt
        self.rewards = np.zeros(num_episodes, np.float64)
        self.success = np.zeros(num_episodes, np.bool_)
        self.valid = np.ones(num_episodes, np.bool_)
        self.finish_reasons = np.full(num_episodes, spi.FinishReason.ABORTED, np.uint8)
        self.budget = np.full(num_episodes, collector.max_response_tokens, np.int64)
        self.num_generated = np.zeros(num_episodes, np.int64)
        self.texts = [""] * num_episodes
        self.states: list[Any] = [None] * num_episodes
        self.conversations = Conversations(num_episodes, collector.tokenizer, collector.sampling.stop_token_ids)
        self.failures = MaskedFailures(
            num_samples=num_episodes, of=collector.purpose, max_fraction=collector.max_failed_fraction
        )
        self.metric_values: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        """Each metric's values, by its name, with the episode that reported each."""
        self.columns: dict[str, list[tuple[AnyArray, Int64Array]]] = {"tokens": [], "logprobs": [], "versions": []}
        """What was appended to episodes at the same moment, in turn: a row for each episode, empty for those that got none."""
        self.routed: list[tuple[Int64Array, spi.RoutedExperts]] = []
        """Episodes of each turn, and where their tokens went, from the first on."""

    def run(self) -> CollectedRollouts:
        active, prompts = self._reset()
        for turn in range(self.c.max_turns):
            responses = self._generate(prompts, active, num_samples=self.c.samples_per_prompt if turn == 0 else 1)
            result = responses.result
            self._append(active, result.offsets, result.tokens, result.logprobs, result.weight_versions)
            if result.routed_experts is not None:
                self.routed.append((active, result.routed_experts))
            observed = self._step(active, responses)
            del responses, result  # they take as much memory as what is made of them
            if turn + 1 == self.c.max_turns:
                break
            # An episode goes on where the environment says so and at least one token can still be generated.
            open_ = [(index, read) for index, read in self._read(observed) if len(read) < self.budget[index]]
            if not open_:
                break
            active = np.asarray([index for index, _ in open_], np.int64)
            packed = spi.RaggedTokens.from_lists([read.tolist() for _, read in open_])
            self.budget[active] -= packed.lengths
            self._append_read(active, packed.offsets, packed.tokens)
            prompts = self._contexts(active)
        return self._collected()

    def _reset(self) -> tuple[Int64Array, spi.RaggedTokens]:
        """The episodes as they begin. Returns all of them and the P prompts."""
        group, prompts = self.c.samples_per_prompt, self.starts.prompts
        for index, reset in enumerate(self.starts.resets):
            members = range(index * group, (index + 1) * group)
            if isinstance(reset, Failure):
                self._fail(members, reset.reason)
                continue
            for member in members:
                self.states[member] = reset.state
            if self.c.max_turns > 1:
                self.conversations.begin(members, reset.observation)
        self.failures.check()
        episodes = np.arange(len(self.rewards), dtype=np.int64)
        shared = np.repeat(np.arange(len(self.starts.rows)), group)
        tokens = take_rows(prompts.tokens, prompts.offsets, shared)
        self._append_read(episodes, offsets_of(prompts.lengths[shared]), tokens)
        return episodes, prompts

    def _fail(self, episodes: Iterable[int], reason: str) -> None:
        """Mask episodes that the environment failed on."""
        for episode in episodes:
            self.valid[episode] = False
            self.failures.add(episode, reason)

    def _generate(self, prompts: spi.RaggedTokens, active: Int64Array, num_samples: int) -> Responses:
        streams = self.c.generator.has(spi.capabilities.STREAMING)
        request = spi.GenerateRequest(
            prompts=prompts,
            num_samples=num_samples,
            seeds=self._seeds()[active],
            max_tokens=self.budget[active].astype(np.int32),
            sampling=self.c.sampling,
            weight_version=self.weight_version,
            on_finished=finished_counter(self.c.progress, len(active)) if streams else None,
            routed_experts=self.c.routed_experts,
        )
        with self.c.clock.phase("generation"):
            return self.c.generator.generate(request)

    def _seeds(self) -> Int64Array:
        """int64 [N]: a turn's, drawn for all episodes of the rows that were asked for. What becomes of an episode, such as that
        it fails on a busy machine, then changes no sample of another."""
        seeds = self.random.integers(0, 2**63 - 1, (self.num_asked, self.c.samples_per_prompt), dtype=np.int64)
        return seeds[self.starts.places].reshape(-1)

    def _step(self, active: Int64Array, responses: Responses) -> dict[int, spi.Observation]:
        """Score a turn of each active episode; returns what those observe that go on."""
        result = responses.result
        lengths = np.diff(result.offsets)
        self.budget[active] -= lengths
        self.num_generated[active] += lengths
        self.finish_reasons[active] = result.finish_reasons
        for index, text, length, end in zip(active.tolist(), responses.texts, lengths, result.offsets[1:], strict=True):
            self.texts[index] += text
            if self.c.max_turns > 1:
                self.conversations.add_turn(index, text, int(result.tokens[end - 1]) if length else None)
        alive = np.flatnonzero(self.valid[active])
        indices = active[alive].tolist()
        states, turns = [self.states[index] for index in indices], responses.turns(alive)
        with self.c.clock.phase("rewards"):
            answers = self.c.episodes.step_all(states, turns)
        scored = {}
        for index, answer in zip(indices, answers, strict=True):
            if isinstance(answer, Failure):
                self._fail([index], answer.reason)
            else:
                scored[index] = answer
        self.failures.check()
        at = list(scored)
        self.rewards[at] += [float(answer.reward) for answer in scored.values()]
        self.success[at] = [answer.success for answer in scored.values()]
        for index, answer in scored.items():
            self.states[index] = answer.state
            for name, value in answer.metrics.items():
                self.metric_values[name].append((index, value))
        return {index: answer.observation for index, answer in scored.items() if answer.observation is not None}

    def _read(self, observed: Mapping[int, spi.Observation]) -> list[tuple[int, Int32Array]]:
        """The tokens that episodes read next; what a chat template cannot tell as it went is a failure of the episode."""
        observed = {index: observation for index, observation in observed.items() if self.budget[index] > 0}
        read = []
        for index, tokens in zip(observed, self.conversations.read(list(observed), list(observed.values())), strict=True):
            if not isinstance(tokens, spi.DataError):
                read.append((index, tokens))
            elif self.c.episodes.masks_failures:
                self._fail([index], str(tokens))
            else:
                raise tokens
        self.failures.check()
        return read

    def _contexts(self, active: Int64Array) -> spi.RaggedTokens:
        """What each active episode has said and read so far."""
        tokens, offsets = join_rows(self.columns["tokens"]), self._all_offsets()
        return spi.RaggedTokens(tokens=take_rows(tokens, offsets, active), offsets=offsets_of(np.diff(offsets)[active]))

    def _append_read(self, episodes: Int64Array, offsets: Int64Array, tokens: Int32Array) -> None:
        """Append the tokens of the environment's observation."""
        number = len(tokens)
        self._append(episodes, offsets, tokens, np.zeros(number, np.float32), np.full(number, NOT_GENERATED, np.int32))

    def _append(
        self, episodes: Int64Array, offsets: Int64Array, tokens: Int32Array, logprobs: Float32Array, versions: Int32Array
    ) -> None:
        """A row to each of some episodes, whose numbers rise."""
        lengths = np.zeros(len(self.rewards), np.int64)
        lengths[episodes] = np.diff(offsets)
        for name, column in (("tokens", tokens), ("logprobs", logprobs), ("versions", versions)):
            self.columns[name].append((column, offsets_of(lengths)))

    def _all_offsets(self) -> Int64Array:
        """int64 [N+1]: of all that each episode has said and read."""
        offsets: Int64Array = np.sum([offsets for _, offsets in self.columns["tokens"]], axis=0)
        return offsets

    def _routed_experts(self, offsets: Int64Array) -> dict[str, AnyArray]:
        """The column ROUTED_EXPERTS, where it is wanted: of a token that several turns have read, what the last one reports."""
        if not self.routed:
            return {}
        episodes, first = self.routed[0]
        if len(self.routed) == 1 and np.array_equal(first.offsets, offsets):
            return {spi.ROUTED_EXPERTS: first.experts}
        column = np.full((int(offsets[-1]), *first.experts.shape[1:]), -1, np.int16)
        for episodes, routed in self.routed:
            for number, start in enumerate(offsets[episodes].tolist()):
                rows = routed.experts[routed.offsets[number] : routed.offsets[number + 1]]
                target = column[start : start + len(rows)]
                np.copyto(target, rows, where=rows >= 0)
        return {spi.ROUTED_EXPERTS: column}

    def _environment_metrics(self) -> dict[str, float]:
        """Means over what valid episodes reported: one that failed in a later turn counts in none of its turns."""
        valid = {
            name: [value for episode, value in values if self.valid[episode]] for name, values in self.metric_values.items()
        }
        return {name: float(np.mean(values)) for name, values in valid.items() if values}

    def _collected(self) -> CollectedRollouts:
        offsets = self._all_offsets()
        tokens, logprobs, versions = (join_rows(self.columns.pop(name)) for name in ("tokens", "logprobs", "versions"))
        loss_mask = versions != NOT_GENERATED
        if not self.valid.all():
            loss_mask = loss_mask & np.repeat(self.valid, np.diff(offsets))
            logprobs = np.where(loss_mask, logprobs, np.float32(0.0))
        if self.failures.reasons:
            self.c.progress.note(str(self.failures))
        group_ids = np.repeat(np.arange(len(self.starts.rows), dtype=np.int32), self.c.samples_per_prompt)
        batch = spi.TokenBatch(
            tokens=tokens,
            offsets=offsets,
            loss_mask=loss_mask,
            token_columns={spi.GENERATION_LOGPROBS: logprobs, spi.WEIGHT_VERSIONS: versions, **self._routed_experts(offsets)},
            sequence_columns={spi.GROUP_IDS: group_ids},
        )
        return CollectedRollouts(
            batch=batch,
            rewards=np.where(self.valid, self.rewards, 0.0).astype(np.float32),
            valid=self.valid,
            finish_reasons=self.finish_reasons,
            success=self.success & self.valid,
            responses=self.texts,
            num_generated=self.num_generated,
            environment_metrics=self._environment_metrics(),
        )
