"""Samples are put together from the events of a stream."""

import pytest
from stub_endpoint import token

from rlcore.spi import FinishReason
from rlcore_openai.errors import WrongAnswerError
from rlcore_openai.samples import Sample, result_of


def test_events_of_any_size_add_up() -> None:
    sample = Sample()
    several = {"text": "ab", "token_ids": [4, 5], "logprobs": {"token_logprobs": [-1.0, -2.0]}}
    for choice in (several, {"text": ""}, token(6, -3.0, "stop")["choices"][0]):
        sample.add(choice)
    found = result_of([sample, Sample()], 0)
    assert (found.tokens.tolist(), found.logprobs.tolist(), found.offsets.tolist()) == ([4, 5, 6], [-1, -2, -3], [0, 3, 3])
    assert found.finish_reasons.tolist() == [FinishReason.STOP, FinishReason.ABORTED]


def test_text_that_a_stop_string_held_back_may_follow_its_tokens() -> None:
    sample = Sample()
    for choice in (
        {"text": "", "token_ids": [4], "logprobs": {"token_logprobs": [-1.0]}},
        {"text": "$"},
        {"finish_reason": "stop"},
    ):
        sample.add(choice)
    assert (sample.tokens, sample.text, sample.reason) == ([4], "$", FinishReason.STOP)


@pytest.mark.parametrize("logprobs", [None, {"token_logprobs": []}, {"token_logprobs": None}])
def test_a_token_without_its_log_probability_is_an_error(logprobs: object) -> None:
    with pytest.raises(WrongAnswerError, match="log-probabilities"):
        Sample().add({"token_ids": [4], "logprobs": logprobs})


@pytest.mark.parametrize(("stops", "expected"), [((6,), FinishReason.STOP), ((5,), FinishReason.ABORTED)])
def test_one_that_is_cut_behind_its_stop_token_has_ended(stops: tuple[int, ...], expected: FinishReason) -> None:
    sample = Sample(tokens=[5, 6], logprobs=[-1.0, -1.0])
    assert sample.cut(stops).reason is expected
