"""What the driver does with a step's sequences and objects without touching them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import TokenBatch
from rlcore.spi.arrays import offsets_of
from rlcore.spi.execution import Minibatch


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12), data=st.data())
def test_counts_are_those_of_a_batch_of_the_sequences_alone(lengths: list[int], data: st.DataObject) -> None:
    offsets = offsets_of(lengths)
    mask = np.asarray(data.draw(st.lists(st.booleans(), min_size=int(offsets[-1]), max_size=int(offsets[-1]))))
    mask[offsets[:-1]] = False
    batch = TokenBatch(tokens=np.arange(offsets[-1], dtype=np.int32), offsets=offsets, loss_mask=mask)
    chosen = np.asarray(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))), np.int64)
    assert Minibatch.of(batch, chosen, batch.loss_lengths, 0).counts == batch.select(chosen).counts()
