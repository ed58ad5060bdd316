"""An episode as data: what it has read and said, its budget, and where it goes on."""

from collections.abc import Sequence

import numpy as np
import pytest

from rlcore.spi import FinishReason, Observation, SamplingParams, StepResult, ToolCall
from rlcore.spi.arrays import Int32Array
from rlcore_rollout.episode import NOT_GENERATED, Completion, CompletionRequest, Episode

PROMPT = np.array([1, 2, 3], np.int32)


def decode(tokens: Sequence[int] | Int32Array) -> str:
    """Two letters for each token but 0, which is special."""
    return "ab" * np.count_nonzero(tokens)


def episode(budget: int = 10) -> Episode:
    made = Episode(number=4, state="first", budget=budget)
    made.read(PROMPT)
    return made


def sampled(number: int, text: str = "said", reason: FinishReason = FinishReason.STOP, experts: bool = False) -> Completion:
    tokens = np.full(number, 7, np.int32)
    return Completion(
        request=CompletionRequest(prompt=PROMPT, seed=0, max_tokens=number + 1, sampling=SamplingParams(), owner=4),
        text=text,
        tokens=tokens,
        logprobs=np.full(number, -0.5, np.float32),
        weight_versions=np.full(number, 3, np.int32),
        finish_reason=reason,
        routed_experts=np.zeros((len(PROMPT) + number, 1, 2), np.int16) if experts else None,
    )


def test_a_turn_that_is_said_waits_for_its_answer() -> None:
    made = episode()
    made.add_turn(
        sampled(4, reason=FinishReason.LENGTH, experts=True), sampled(4, reason=FinishReason.LENGTH, experts=True).text
    )
    assert made.unanswered_turn is not None
    assert (made.unanswered_turn.text, made.unanswered_turn.tokens.tolist(), made.unanswered_turn.finish_reason) == (
        "said",
        [7] * 4,
        FinishReason.LENGTH,
    )
    with pytest.raises(ValueError, match="read-only"):
        made.unanswered_turn.tokens[0] = 1
    assert (made.budget, made.num_generated, made.length, made.finish_reason) == (6, 4, 7, FinishReason.LENGTH)
    assert [(place, len(rows)) for place, rows in made.routed] == [(0, 7)]


def test_an_answer_takes_the_place_of_the_turn() -> None:
    made = episode()
    made.add_turn(sampled(2), sampled(2).text)
    made.score(
        StepResult(
            reward=0.5,
            done=False,
            state="second",
            observation=Observation(text="?"),
            metrics={"a": 1.0},
            reward_components={"x": 0.25},
        ),
        decode,
    )
    assert made.unanswered_turn is None
    assert made.unread_observation is not None
    assert made.unread_observation.text == "?"
    assert (made.state, sum(made.rewards), made.success, made.metrics) == ("second", 0.5, False, (("a", 1.0),))
    made.next_turn(np.array([9], np.int32))
    made.add_turn(sampled(1, text=" again"), sampled(1, text=" again").text)
    made.score(StepResult(reward=0.25, done=True, success=True, metrics={"a": 2.0}, reward_components={"x": 1, "y": 2}), decode)
    assert (made.unread_observation, sum(made.rewards), made.success, made.text) == (None, 0.75, True, "said again")
    assert made.metrics == (("a", 1.0), ("a", 2.0))
    assert made.reward_components == {"x": 1.25, "y": 2.0}


def test_each_turn_has_its_place_and_what_it_earned() -> None:
    made = episode()
    made.add_turn(sampled(2), sampled(2).text)
    made.score(StepResult(reward=0.5, done=False, observation=Observation(text="?")), decode)
    made.next_turn(np.array([9], np.int32))
    made.add_turn(sampled(1), sampled(1).text)
    assert (made.turns, made.rewards) == (((3, 5), (6, 7)), (0.5, 0.0))
    made.score(StepResult(reward=2.0, done=True), decode)
    assert made.rewards == (0.5, 2.0)


def test_a_limit_that_cuts_an_episode_off_shows() -> None:
    """The last turn's own, or turns and budget, after which something was left to say."""
    made = episode(budget=6)
    made.max_turn_tokens = 4
    assert made.turn_budget == 4
    made.add_turn(sampled(4, reason=FinishReason.LENGTH), sampled(4, reason=FinishReason.LENGTH).text)
    assert (made.turn_budget, made.truncated) == (2, True)
    made.score(StepResult(reward=0.0, done=False, observation=Observation(text="?")), decode)
    made.next_turn(np.array([9], np.int32))
    assert not made.ended
    made.add_turn(sampled(1), sampled(1).text)
    made.score(StepResult(reward=0.0, done=True), decode)
    assert not made.truncated
    made.unread_observation = Observation(text="?")
    made.next_turn(np.array([9], np.int32))
    assert made.ended
    assert made.truncated


def test_a_turn_has_its_calls_of_tools_apart() -> None:
    made = episode()
    call = ToolCall(id="0", name="f", text="")
    made.add_turn(sampled(2), "said", "2 tokens", [call])
    assert made.unanswered_turn is not None
    assert (made.unanswered_turn.text, made.unanswered_turn.content, made.unanswered_turn.tool_calls) == (
        "said",
        "2 tokens",
        [call],
    )


def test_what_is_read_costs_budget_and_is_not_generated() -> None:
    made = episode(budget=6)
    made.add_turn(sampled(2), sampled(2).text)
    made.unread_observation = Observation(text="?")
    made.next_turn(np.array([8, 9], np.int32))
    assert (made.unread_observation, made.ended, made.turn, made.budget, made.num_generated) == (None, False, 1, 2, 2)
    assert made.context().tolist() == [1, 2, 3, 7, 7, 8, 9]
    assert np.concatenate(made.versions).tolist() == [NOT_GENERATED] * 3 + [3] * 2 + [NOT_GENERATED] * 2
    assert np.concatenate(made.logprobs).tolist() == [0.0] * 3 + [-0.5] * 2 + [0.0] * 2
    assert made.context() is made.tokens[0]


@pytest.mark.parametrize("num_read", [4, 5])
def test_it_ends_where_no_token_could_be_said_after_what_is_read(num_read: int) -> None:
    made = episode(budget=6)
    made.add_turn(sampled(2), sampled(2).text)
    made.next_turn(np.full(num_read, 9, np.int32))
    assert (made.ended, made.turn, made.length) == (True, 0, 5)


def test_without_tokens_its_context_is_empty() -> None:
    empty = Episode(number=0, state=None, budget=1).context()
    assert (len(empty), empty.dtype) == (0, np.int32)


@pytest.mark.parametrize(
    ("part_rewards", "parts"),
    [
        ({}, [(3, 8, 1.0, False)]),
        ({4: 0.5}, [(3, 5, 0.5, False), (5, 8, 1.0, True)]),
        # A part that ends within a token ends behind it.
        ({3: 0.5, 1: 0.25}, [(3, 4, 0.25, False), (4, 5, 0.5, True), (5, 8, 1.0, True)]),
        # Two parts that end in one token are one.
        ({3: 0.5, 4: 0.25}, [(3, 5, 0.75, False), (5, 8, 1.0, True)]),
        # The last token's part is the turn's end.
        ({2: 0.5, 10: 0.25}, [(3, 4, 0.5, False), (4, 8, 1.25, True)]),
    ],
)
def test_parts_of_a_turn_end_at_tokens(part_rewards: dict[int, float], parts: list[tuple[int, int, float, bool]]) -> None:
    made = episode()
    made.add_turn(sampled(5), "ab" * 5)
    made.score(StepResult(reward=1.0, part_rewards=part_rewards, done=False, observation=Observation(text="?")), decode)
    assert list(made.rewarded_parts()) == parts
    assert made.rewards == (1.0 + sum(part_rewards.values()),)
    made.next_turn(np.array([9, 9], np.int32))
    made.add_turn(sampled(2), "ab" * 2)
    made.score(StepResult(reward=2.0, part_rewards={2: -1.0}, done=True), decode)
    assert list(made.rewarded_parts()) == [*parts, (10, 11, -1.0, False), (11, 12, 2.0, True)]
