"""The samples that sinks show."""

import numpy as np
from attrs import evolve

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import ADVANTAGES, WEIGHT_VERSIONS, FinishReason, LoggedSample, TokenBatch
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout.logged_samples import logged_samples

N = 5
MASK = np.tile([False, True, True], N)
BATCH = TokenBatch(
    tokens=np.arange(3 * N, dtype=np.int32) % 7,
    offsets=np.arange(0, 3 * N + 1, 3),
    loss_mask=MASK,
    token_columns={WEIGHT_VERSIONS: np.where(MASK, 0, -1).astype(np.int32)},
    sequence_columns={"group_ids": np.arange(N, dtype=np.int32)},
    images=((), (), (b"a", b"b"), (), ()),
)
COLLECTED = CollectedRollouts(
    batch=BATCH,
    rewards=np.arange(N, dtype=np.float32),
    valid=np.ones(N, np.bool_),
    finish_reasons=np.full(N, FinishReason.STOP, np.uint8),
    success=np.ones(N, np.bool_),
    responses=list("abcde"),
    num_generated=np.full(N, 2),
    failed=np.zeros(N, np.bool_),
    timed_out=np.zeros(N, np.bool_),
    truncated=np.zeros(N, np.bool_),
)


def test_some_are_chosen_over_the_whole_step_with_what_they_were_trained_with() -> None:
    trained = evolve(BATCH, token_columns={ADVANTAGES: np.arange(3 * N, dtype=np.float32)})
    tokenizer = FakeTokenizer()
    first, image, last = logged_samples(COLLECTED, trained, 3, tokenizer)
    (prompt,) = tokenizer.decode_batch([BATCH.tokens[:1]])
    assert first == LoggedSample(group=0, prompt=prompt, response="a", reward=0.0, advantage=1.5)
    assert image.prompt.startswith("[image] [image] ")
    assert (last.group, last.response, last.reward, last.advantage) == (4, "e", 4.0, 13.5)


def test_there_are_no_more_than_there_are_and_no_advantage_without_one() -> None:
    found = logged_samples(COLLECTED, BATCH, 99, FakeTokenizer())
    assert [sample.group for sample in found] == [0, 1, 2, 3, 4]
    assert {sample.advantage for sample in found} == {None}
