"""Batches as flat tables of arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import SamplingMask, TokenBatch
from rlcore_bundles.arrays import put_batch, take_batch


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    """Batches with columns of several kinds."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    offsets, total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), sum(lengths)
    mask = random.random(total) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    mask[offsets[:-1]] = False
    of_sequence = np.where(mask, np.repeat(random.normal(size=len(lengths)), lengths), -1).astype(np.float32)
    kept = SamplingMask.of([random.integers(0, 9, random.integers(0, 3)).astype(np.int32) for _ in range(total)])
    files = [random.bytes(3), random.bytes(0), random.bytes(5)]
    images = tuple(tuple(files[one] for one in random.integers(0, 3, random.integers(0, 3))) for _ in lengths)
    return TokenBatch(
        tokens=random.integers(0, 99, total).astype(np.int32),
        offsets=offsets,
        loss_mask=mask,
        token_columns={
            "advantages": of_sequence,
            "zeros": np.where(mask, np.float32(-0.0), np.float32(0.0)),
            "generation_logprobs": random.normal(size=total).astype(np.float32),
            "weight_versions": np.where(mask, 3, -1).astype(np.int32),
            "routed_experts": random.integers(-1, 4, (total, 2, 2)).astype(np.int16),
        },
        sequence_columns={"group_ids": np.arange(len(lengths), dtype=np.int32)},
        sampling_mask=kept if draw(st.booleans()) else None,
        images=images if draw(st.booleans()) else None,
    )


@given(batch=batches())
def test_a_batch_comes_back_to_the_bit(batch: TokenBatch) -> None:
    table: dict[str, np.ndarray] = {}
    put_batch(table, "batch", batch)
    found = take_batch(table, "batch")
    for name in ("tokens", "offsets", "loss_mask"):
        np.testing.assert_array_equal(getattr(found, name), getattr(batch, name))
    for columns in ("token_columns", "sequence_columns"):
        before, after = getattr(batch, columns), getattr(found, columns)
        assert {name: (one.dtype, one.tobytes()) for name, one in before.items()} == {
            name: (one.dtype, one.tobytes()) for name, one in after.items()
        }
    assert found.images == batch.images
    if batch.sampling_mask is None:
        assert found.sampling_mask is None
    else:
        assert found.sampling_mask is not None
        np.testing.assert_array_equal(found.sampling_mask.tokens, batch.sampling_mask.tokens)
        np.testing.assert_array_equal(found.sampling_mask.offsets, batch.sampling_mask.offsets)


def test_a_column_of_one_number_a_sequence_takes_few_bytes() -> None:
    lengths = np.full(64, 4096)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False
    column = np.where(mask, np.repeat(np.linspace(-1, 1, 64), lengths), 0).astype(np.float32)
    batch = TokenBatch(
        tokens=np.ones(int(offsets[-1]), np.int32), offsets=offsets, loss_mask=mask, token_columns={"advantages": column}
    )
    table: dict[str, np.ndarray] = {}
    put_batch(table, "batch", batch)
    assert sum(one.nbytes for one in table.values()) < 1.05 * (batch.tokens.nbytes + mask.nbytes / 8)
