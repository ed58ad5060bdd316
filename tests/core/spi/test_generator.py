"""Requests and results of generation check themselves."""

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ContractError, GenerateRequest, GenerateResult, RaggedTokens, RoutedExperts, SamplingParams

REQUEST = GenerateRequest(
    prompts=RaggedTokens.from_lists([[1, 2], [3]]),
    num_samples=2,
    seeds=np.arange(4, dtype=np.int64),
    max_tokens=np.full(4, 3, np.int32),
    sampling=SamplingParams(),
    weight_version=0,
)
RESULT = GenerateResult(
    tokens=np.array([1, 2, 3], np.int32),
    offsets=np.array([0, 3, 3], np.int64),
    logprobs=np.zeros(3, np.float32),
    weight_versions=np.zeros(3, np.int32),
    finish_reasons=np.array([0, 2], np.uint8),
)


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (REQUEST, {"seeds": np.arange(3, dtype=np.int64)}),
        (REQUEST, {"seeds": np.arange(4, dtype=np.int32)}),
        (REQUEST, {"seeds": np.array([0, 1, 2, -1])}),
        (REQUEST, {"max_tokens": np.array([3, 3, 0, 3], np.int32)}),
        (REQUEST, {"max_tokens": np.full(4, 3, np.int64)}),
        (REQUEST, {"num_samples": 3}),
        (RESULT, {"tokens": RESULT.tokens.astype(np.int64)}),
        (RESULT, {"offsets": np.array([0, 2])}),
        (RESULT, {"logprobs": np.zeros(2, np.float32)}),
        (RESULT, {"logprobs": np.zeros(3)}),
        (RESULT, {"weight_versions": np.zeros(3, np.int64)}),
        (RESULT, {"finish_reasons": np.zeros(2, np.int64)}),
        (RESULT, {"finish_reasons": np.zeros(3, np.uint8)}),
    ],
)
def test_records_refuse_arrays_of_the_wrong_shape_dtype_or_range(record, changes):
    with pytest.raises(ContractError) as raised:
        evolve(record, **changes)
    (name,) = changes
    assert name in str(raised.value) or name in ("offsets", "num_samples")


@pytest.mark.parametrize(
    ("experts", "offsets", "message"),
    [
        (np.zeros((4, 2), np.int16), [0, 4], r"found int16 \[4, 2\]; expected int16 \[R, L, K\]"),
        (np.zeros((4, 2, 2), np.int32), [0, 4], r"found int32 \[4, 2, 2\]; expected int16"),
        ([], [0], r"found list \[0\]; expected int16"),
        (np.zeros((4, 2, 2), np.int16), [0, 3], "expected to start at 0, end at 4"),
    ],
)
def test_a_record_of_another_form_is_refused(experts, offsets, message):
    with pytest.raises(ContractError, match=message):
        RoutedExperts(experts=experts, offsets=np.array(offsets, np.int64))
