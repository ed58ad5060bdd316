"""Episodes of a step: packed in order, generated tokens apart from those that were read, each sample's draws its own."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field

from rlcore.run.protocols import CollectedRollouts
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import (
    GENERATION_LOGPROBS,
    GROUP_IDS,
    ROUTED_EXPERTS,
    WEIGHT_VERSIONS,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Observation,
    ResetResult,
    RewardError,
    Row,
    SamplingMask,
    SamplingParams,
    StepResult,
    Turn,
    capabilities,
)
from rlcore.spi.arrays import offsets_of
from rlcore.spi.execution import ResponseFeed, Responses
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.episode import Completion, CompletionRequest, Episode
from rlcore_rollout.episode_group import EpisodeGroup
from rlcore_rollout.sampler import NOT_GENERATED, EpisodeSampler
from rlcore_rollout.step_plans import PromptLimit

from .answering import answer_stream

TOKENIZER = FakeTokenizer()


@define
class Speller:
    """A generator that answers with as many letters as a sample's seed says, one of them for each number of the seed."""

    declared: frozenset[str] = frozenset()
    requests: list[GenerateRequest] = field(factory=list)

    def has(self, capability: str) -> bool:
        return capability in self.declared

    def generate(self, request: GenerateRequest) -> Responses:
        self.requests.append(request)
        lengths = np.minimum(request.seeds % 5 + 1, request.max_tokens)
        tokens = np.repeat(request.seeds % 26 + 1, lengths).astype(np.int32)
        result = GenerateResult(
            tokens=tokens,
            offsets=offsets_of(lengths),
            logprobs=-tokens.astype(np.float32),
            weight_versions=np.full(len(tokens), request.weight_version, np.int32),
            finish_reasons=np.where(lengths < request.max_tokens, FinishReason.STOP, FinishReason.LENGTH).astype(np.uint8),
        )
        return Responses.of(result, TOKENIZER)

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        answer_stream(self.generate, feed)


@define
class Echo:
    """An environment that rewards the number of letters, and goes on for so many turns."""

    num_turns: int = 1
    fails: tuple[str, ...] = ()
    """Prompts whose episodes cannot begin."""

    async def reset(self, row: Row, seed: int) -> ResetResult:
        if row["prompt"] in self.fails:
            raise ConnectionError("no judge")
        return ResetResult(observation=Observation(text=row["prompt"]), state=1)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        done = state == self.num_turns
        metrics = {"turn": float(state)}
        parts = {"letters": float(len(turn.text)), **({"last": 1.0} if done else {})}
        common = {"reward": float(len(turn.text)), "done": done, "metrics": metrics, "reward_components": parts}
        return (
            StepResult(**common, success=len(turn.text) > 2)
            if done
            else StepResult(**common, observation=Observation(text=" more:"), state=state + 1)
        )

    def rows(self, split: str) -> None:
        return None


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.finished_samples: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def samples(self, num_finished: int, num_samples: int) -> None:
        self.finished_samples.append((num_finished, num_samples))


@pytest.fixture
def sampler():
    """Makes a sampler of Speller and Echo with other options."""
    runners = []

    def make(environment: Echo | None = None, on_error: Any = "error", **options: Any) -> EpisodeSampler:
        runners.append(EpisodeRunner(environment or Echo(), 60.0, on_error))
        progress = Notes()
        defaults = {
            "generator": Speller(),
            "episodes": runners[-1],
            "tokenizer": TOKENIZER,
            "sampling": SamplingParams(stop_token_ids=(0,)),
            "samples_per_prompt": 3,
            "prompt_limit": PromptLimit(max_tokens=6, drops=False, key="data.train"),
            "max_response_tokens": 40,
            "max_turns": 1,
            "max_failed_fraction": 0.5,
            "clock": PhaseClock(progress),
            "progress": progress,
        }
        return EpisodeSampler(**{**defaults, **options})

    yield make
    for runner in runners:
        runner.close()


def rows(*prompts: str) -> list[Row]:
    return [{"prompt": prompt} for prompt in prompts]


def sequences(collected: CollectedRollouts, column: Any) -> list[list[Any]]:
    offsets = collected.batch.offsets
    return [column[start:end].tolist() for start, end in pairwise(offsets.tolist())]


def test_samples_of_a_prompt_are_adjacent_and_hold_the_prompt_and_the_response(sampler) -> None:
    made = sampler()
    collected = made.collect(rows("a:", "bb:"), 4, seed=(0, 1, 1))
    batch = collected.batch
    assert batch.sequence_columns[GROUP_IDS].tolist() == [0, 0, 0, 1, 1, 1]
    for number, tokens in enumerate(sequences(collected, batch.tokens)):
        assert TOKENIZER.decode(tokens) == ("a:" if number < 3 else "bb:") + collected.responses[number]
    generated = batch.loss_mask
    assert batch.token_columns[WEIGHT_VERSIONS][generated].tolist() == [4] * int(generated.sum())
    assert set(batch.token_columns[WEIGHT_VERSIONS][~generated].tolist()) == {NOT_GENERATED}
    np.testing.assert_array_equal(batch.token_columns[GENERATION_LOGPROBS], np.where(generated, -batch.tokens, 0))
    assert collected.rewards.tolist() == [len(text) for text in collected.responses] == collected.num_generated.tolist()
    assert collected.success.tolist() == [len(text) > 2 for text in collected.responses]
    assert collected.environment_metrics == {"turn": 1.0}


def test_samples_follow_from_the_seed_and_the_version_is_passed_on(sampler) -> None:
    first, again, other = (sampler() for _ in range(3))
    texts = [made.collect(rows("a:", "b:"), 2, seed).responses for made, seed in ((first, [5]), (again, [5]), (other, [6]))]
    assert texts[0] == texts[1] != texts[2]
    (request,) = first.generator.requests
    assert (request.weight_version, request.num_samples) == (2, 3)
    assert len(set(request.seeds.tolist())) == 6
    assert request.on_finished is None


def test_later_turns_read_the_whole_conversation_and_share_one_budget(sampler) -> None:
    made = sampler(Echo(num_turns=3), max_turns=3, max_response_tokens=30)
    collected = made.collect(rows("a:"), 0, seed=[1])
    first, *later = made.generator.requests
    assert first.num_samples == 3
    assert (first.max_tokens == 30).all()
    texts = [TOKENIZER.decode(tokens) for tokens in sequences(collected, collected.batch.tokens)]
    assert all(text.count(" more:") == 2 for text in texts)
    contexts = [
        (TOKENIZER.decode(request.prompts.sequence(number)), int(request.max_tokens[number]))
        for request in later
        for number in range(request.prompts.num_sequences)
    ]
    assert len(contexts) == 6
    for context, left in contexts:
        assert context.endswith(" more:")
        assert any(text.startswith(context) for text in texts)
        assert left == 30 - (len(context) - len("a:"))
    assert (collected.num_generated + 2 * len(" more:") <= 30).all()
    np.testing.assert_array_equal(collected.reward_components["letters"], collected.rewards)
    assert collected.reward_components["last"].tolist() == [1.0] * 3
    assert collected.environment_metrics == {"turn": 2.0, "segments_per_episode": 1.0}


def test_an_episode_ends_where_no_token_is_left_for_its_answer(sampler) -> None:
    made = sampler(Echo(num_turns=3), max_turns=3, max_response_tokens=len(" more:") + 1)
    collected = made.collect(rows("a:"), 0, seed=[1])
    assert len(made.generator.requests) == 1
    assert all(" more:" not in TOKENIZER.decode(tokens) for tokens in sequences(collected, collected.batch.tokens))


def test_an_episode_that_cannot_begin_is_masked_and_changes_no_other(sampler) -> None:
    sound = sampler(on_error="mask").collect(rows("a:", "b:", "c:"), 0, seed=[3])
    made = sampler(Echo(fails=("b:",)), on_error="mask")
    collected = made.collect(rows("a:", "b:", "c:"), 0, seed=[3])
    assert collected.valid.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert [collected.responses[index] for index in (0, 1, 2, 6, 7, 8)] == [
        sound.responses[index] for index in (0, 1, 2, 6, 7, 8)
    ]
    assert not any(any(mask) for mask in sequences(collected, collected.batch.loss_mask)[3:6])
    assert collected.rewards[3:6].tolist() == [0.0] * 3
    (note,) = made.progress.notes
    assert note == "the environment failed on 3 of 9 samples of the step: 3 x raised ConnectionError: no judge"
    with pytest.raises(RewardError, match=r"3 of 6 samples of the evaluation.*max_failed_fraction = 0\.25"):
        evolve(made, purpose="the evaluation", max_failed_fraction=0.25).collect(rows("a:", "b:"), 0, seed=[3])


def test_a_generator_that_streams_tells_how_far_it_is(sampler) -> None:
    made = sampler(generator=Speller(frozenset({capabilities.STREAMING})))
    made.collect(rows("a:", "b:"), 0, seed=[0])
    assert made.progress.finished_samples[-1] == (6, 6)


@pytest.mark.parametrize("prompts", [("a:", "much too long:", "c:")])
def test_a_prompt_over_the_limit_is_left_out_and_changes_no_other(sampler, prompts: Sequence[str]) -> None:
    drops = PromptLimit(max_tokens=6, drops=True, key="data.train")
    made = sampler(prompt_limit=drops)
    collected = made.collect(rows(*prompts), 0, seed=[3])
    assert len(collected.rewards) == 6
    whole = sampler(prompt_limit=evolve(drops, max_tokens=20)).collect(rows(*prompts), 0, seed=[3])
    assert list(collected.responses) == [*whole.responses[:3], *whole.responses[6:]]
    (note,) = made.progress.notes
    assert note.startswith("data.train: 1 ")


def in_segments(number: int) -> Episode:
    """An episode whose turn of tokens 7 and 8 follows the prompt 1 2, and whose turn of 9 follows the context 1 3 in another
    segment. Experts are the tokens' own numbers, and each token was chosen among itself and the next."""
    made = Episode(number=number, state=None, budget=20, images=(b"image",))
    made.read(np.array([1, 2], np.int32))
    for said, text, context in (([7, 8], "ab", [1, 3]), ([9], "c", None)):
        tokens = np.array(said, np.int32)
        request = CompletionRequest(prompt=made.context(), seed=0, max_tokens=9, sampling=SamplingParams(), owner=made)
        found = Completion(
            request=request,
            text=text,
            tokens=tokens,
            logprobs=-tokens.astype(np.float32),
            weight_versions=np.full(len(said), 4, np.int32),
            finish_reason=FinishReason.LENGTH if context else FinishReason.STOP,
            routed_experts=np.concatenate([made.context(), tokens]).astype(np.int16).reshape(-1, 1, 1),
            sampling_mask=SamplingMask.of([np.array([token, token + 1], np.int32) for token in said]),
        )
        made.add_turn(found, text)
        made.score(StepResult(reward=1.0, done=context is None, observation=None), lambda _: "")
        if context is not None:
            made.next_turn(np.array(context, np.int32), begins_segment=True)
    made.ended = True
    return made


def test_each_segment_has_its_images_its_experts_and_its_kept_tokens(sampler) -> None:
    made = sampler(samples_per_prompt=2, max_turns=2, sampling_mask=True)
    group = EpisodeGroup(number=0, episodes=[in_segments(0), in_segments(1)])
    collected = made.packed([group]).rollouts
    batch = collected.batch
    assert sequences(collected, batch.tokens) == [[1, 2, 7, 8], [1, 3, 9]] * 2
    assert sequences(collected, batch.loss_mask) == [[False, False, True, True], [False, False, True]] * 2
    assert batch.token_columns[ROUTED_EXPERTS][:, 0, 0].tolist() == batch.tokens.tolist()
    assert batch.images == ((b"image",),) * 4
    assert batch.sampling_mask is not None
    assert batch.sampling_mask.lengths.tolist() == [0, 0, 2, 2, 0, 0, 2] * 2
    assert batch.sampling_mask.tokens.tolist() == [7, 8, 8, 9, 9, 10] * 2
    assert collected.turns is not None
    assert sequences(collected, collected.turns.turn_of) == [[-1, -1, 0, 0], [-1, -1, 1]] * 2
    assert collected.responses == ["ab", "c"] * 2
    assert collected.finish_reasons.tolist() == [FinishReason.LENGTH, FinishReason.STOP] * 2
    assert (collected.rewards.tolist(), collected.num_generated.tolist()) == ([2.0] * 4, [2, 1] * 2)
