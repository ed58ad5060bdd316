"""Turns that go on after a cut: seeds that repeat nothing, and stop strings that lie across it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import FinishReason, SamplingMask, SamplingParams
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout.episode import Completion, CompletionRequest, until_stop
from rlcore_rollout.step_plans import seed_after

TOKENIZER = FakeTokenizer()


def sampled(text: str, stops: tuple[str, ...]) -> Completion:
    tokens = np.asarray(TOKENIZER.encode(text), np.int32)
    number = len(tokens)
    sampling = SamplingParams(stop_strings=stops)
    return Completion(
        request=CompletionRequest(prompt=np.array([1], np.int32), seed=0, max_tokens=99, sampling=sampling, owner=None),
        text=text,
        tokens=tokens,
        logprobs=-np.arange(number, dtype=np.float32),
        weight_versions=np.full(number, 3, np.int32),
        finish_reason=FinishReason.LENGTH,
        routed_experts=np.arange(5 + number, dtype=np.int16)[:, None, None],
        sampling_mask=SamplingMask.of([tokens[place : place + 1] for place in range(number)]),
    )


def test_a_turn_that_was_not_cut_keeps_its_seed() -> None:
    assert seed_after(17, 0) == 17


@given(seed=st.integers(0, 2**63 - 2), num_said=st.integers(1, 10**6))
def test_the_rest_of_a_turn_has_a_seed_of_its_own(seed: int, num_said: int) -> None:
    assert 0 <= seed_after(seed, num_said) < 2**63
    assert len({seed, seed_after(seed, num_said), seed_after(seed, num_said + 1)}) == 3


@given(text=st.text("abc", min_size=1, max_size=12), cut=st.integers(1, 11), stop=st.text("abc", min_size=1, max_size=3))
def test_a_stop_string_across_the_cut_ends_the_turn_where_it_would_have_ended(text: str, cut: int, stop: str) -> None:
    """A generator ends a turn with the first stop string that is whole; behind a cut it sees those alone that begin there."""
    before, after = text[:cut], text[cut:]
    if not after or stop in before:
        return
    found = until_stop([np.asarray(TOKENIZER.encode(before), np.int32)], sampled(after, (stop,)), TOKENIZER.decode)
    whole = text[: text.index(stop) + len(stop)] if stop in text else text
    assert before + TOKENIZER.decode(found.tokens) == whole
    number = len(found.tokens)
    assert len(found.logprobs) == len(found.weight_versions) == number
    assert found.routed_experts is not None
    assert len(found.routed_experts) == 5 + number
    assert found.sampling_mask is not None
    np.testing.assert_array_equal(found.sampling_mask.tokens, found.tokens)
    assert found.finish_reason == (FinishReason.STOP if stop in text else FinishReason.LENGTH)


def test_nothing_is_looked_for_in_a_turn_that_was_not_cut() -> None:
    whole = sampled("abc", ("b",))
    assert until_stop([], whole, TOKENIZER.decode) is whole
