"""The way to SGLang's sampling parameters and back from its finish reasons."""

import pytest

from rlcore.spi import FinishReason, SamplingParams
from rlcore_sglang.sampling import engine_sampling, finish_reason


def test_a_request_names_all_that_stops_it() -> None:
    found = engine_sampling(SamplingParams(temperature=0.5, stop_token_ids=(3, 5)), 7)
    assert found["temperature"] == 0.5
    assert found["max_new_tokens"] == 7
    assert found["stop_token_ids"] == [3, 5]
    assert found["ignore_eos"] is False
    assert engine_sampling(SamplingParams(), 7)["stop_token_ids"] is None


@pytest.mark.parametrize(
    ("reason", "tokens", "expected"),
    [
        ({"type": "stop", "matched": 3}, [1, 3], FinishReason.STOP),
        ({"type": "length", "length": 4}, [1, 2, 1, 2], FinishReason.LENGTH),
        ({"type": "length", "length": 4}, [1, 2, 1, 3], FinishReason.STOP),
        ({"type": "length", "length": 3}, [1, 2, 3], FinishReason.ABORTED),
        ({"type": "abort", "message": "Abort in waiting queue"}, [], FinishReason.ABORTED),
        (None, [1, 2, 1, 2], FinishReason.ABORTED),
    ],
)
def test_samples_end_for_the_reason_that_their_tokens_show(
    reason: dict[str, object] | None, tokens: list[int], expected: FinishReason
) -> None:
    """A sample cut short is aborted, and one whose last token within the limit stops it is finished."""
    assert finish_reason(reason, tokens, 4, {3}) == expected
