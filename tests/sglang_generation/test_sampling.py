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
    ("reason", "num_tokens", "expected"),
    [
        ({"type": "stop", "matched": 3}, 2, FinishReason.STOP),
        ({"type": "length", "length": 7}, 7, FinishReason.LENGTH),
        ({"type": "length", "length": 6}, 6, FinishReason.ABORTED),
        ({"type": "abort", "message": "Abort in waiting queue"}, 0, FinishReason.ABORTED),
        (None, 7, FinishReason.ABORTED),
    ],
)
def test_a_sample_cut_short_is_aborted(reason: dict[str, object] | None, num_tokens: int, expected: FinishReason) -> None:
    assert finish_reason(reason, num_tokens, 7) == expected
