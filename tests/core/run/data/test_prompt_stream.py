"""The order of rows: each epoch takes every row once, and a step's batch depends on the seed and the step alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore.run.data.prompt_stream import MixedStream, PromptStream

sizes = st.integers(1, 40)


@given(num_rows=sizes, batch_size=sizes, seed=st.integers(0, 2**31), shuffle=st.booleans())
def test_every_epoch_takes_every_row_once(num_rows, batch_size, seed, shuffle):
    stream = PromptStream(num_rows=num_rows, batch_size=batch_size, seed=seed, shuffle=shuffle)
    num_epochs = 3
    num_steps = -(-num_epochs * num_rows // batch_size)
    batches = [stream.indices(step) for step in range(num_steps)]
    assert all(batch.dtype == np.int64 and len(batch) == batch_size for batch in batches)
    taken = np.concatenate(batches)[: num_epochs * num_rows].reshape(num_epochs, num_rows)
    for epoch in taken:
        assert sorted(epoch.tolist()) == list(range(num_rows))
        assert shuffle or epoch.tolist() == list(range(num_rows))
    assert [stream.epoch(step) for step in range(num_steps)] == [step * batch_size // num_rows for step in range(num_steps)]


@given(num_rows=sizes, batch_size=sizes, seed=st.integers(0, 2**31), step=st.integers(0, 1000))
def test_a_batch_needs_none_of_those_before(num_rows, batch_size, seed, step):
    stream = PromptStream(num_rows=num_rows, batch_size=batch_size, seed=seed, shuffle=True)
    for earlier in range(min(step, 5)):
        stream.indices(earlier)
    before = stream.indices(step)
    for other in range(100):  # so many that nothing is remembered of the first
        PromptStream(num_rows=1, batch_size=1, seed=other, shuffle=True).indices(0)
    again = PromptStream(num_rows=num_rows, batch_size=batch_size, seed=seed, shuffle=True).indices(step)
    assert before.tolist() == again.tolist()


def test_epochs_and_seeds_differ():
    def epochs(seed):
        stream = PromptStream(num_rows=50, batch_size=50, seed=seed, shuffle=True)
        return [tuple(stream.indices(step).tolist()) for step in range(4)]

    assert len({*epochs(0), *epochs(1)}) == 8


def test_a_caller_that_writes_to_a_batch_changes_no_other():
    stream = PromptStream(num_rows=8, batch_size=8, seed=0, shuffle=True)
    first = stream.indices(0)
    kept = first.tolist()
    first[:] = 0
    assert stream.indices(0).tolist() == kept


def test_a_million_rows_are_not_shuffled_again_each_step(monkeypatch):
    stream = PromptStream(num_rows=1_000_000, batch_size=64, seed=0, shuffle=True)
    stream.indices(0)
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "default_rng", None)  # nothing is drawn any more
        for step in range(200):
            stream.indices(step)


@given(num_rows=sizes, batch_size=sizes, seed=st.integers(0, 2**31), step=st.integers(0, 1000), shuffle=st.booleans())
def test_what_follows_a_step_is_every_row_once_and_its_own_last(num_rows, batch_size, seed, step, shuffle):
    stream = PromptStream(num_rows=num_rows, batch_size=batch_size, seed=seed, shuffle=shuffle)
    following, own = stream.following(step).tolist(), set(stream.indices(step).tolist())
    assert sorted(following) == list(range(num_rows))
    assert set(following[num_rows - len(own) :]) == own
    others = [row for later in range(1, 1 + 2 * num_rows) for row in stream.indices(step + later).tolist() if row not in own]
    assert following[: num_rows - len(own)] == list(dict.fromkeys(others))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    shuffle=st.booleans(),
)
def test_a_mix_has_the_weights_shares_and_each_set_comes_in_its_own_order(sizes, data, batch_size, seed, shuffle):
    weights = tuple(data.draw(st.floats(0.1, 10)) for _ in sizes)
    stream = MixedStream(
        sizes=tuple(sizes), weights=weights, num_rows=sum(sizes), batch_size=batch_size, seed=seed, shuffle=shuffle
    )
    num_steps = 200 // batch_size
    rows = np.concatenate([stream.indices(step) for step in range(num_steps)])
    starts = np.cumsum([0, *sizes])
    set_of = np.searchsorted(starts, rows, side="right") - 1
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        own = rows[set_of == number] - starts[number]
        assert abs(len(own) - len(rows) * weight / sum(weights)) < 5  # 200 draws by chance would be off by 7 and more
        for epoch in range(len(own) // size):
            taken = own[epoch * size : (epoch + 1) * size].tolist()
            assert sorted(taken) == list(range(size))
            assert shuffle or taken == list(range(size))
    later = num_steps - 1
    assert stream.indices(later).tolist() == rows[later * batch_size :].tolist()
    following = stream.following(later)
    assert sorted(following.tolist()) == list(range(sum(sizes)))
    own = set(stream.indices(later).tolist())
    assert set(following[-len(own) :].tolist()) == own


def test_a_mix_far_from_its_beginning_goes_on_where_it_was():
    stream = MixedStream(sizes=(7, 5), weights=(3.0, 1.0), num_rows=12, batch_size=1000, seed=3, shuffle=True)
    rows = stream.rows(0, 200_000)
    assert stream.rows(131_000, 200_000).tolist() == rows[131_000:].tolist()
    other = MixedStream(sizes=(7, 5), weights=(3.0, 1.0), num_rows=12, batch_size=1000, seed=4, shuffle=False)
    assert ((other.rows(0, 50) < 7) != (rows[:50] < 7)).any()  # the seed decides which set comes when


def test_a_weight_that_is_next_to_nothing_beside_another_is_one_too():
    order = MixedStream(num_rows=4, batch_size=2, seed=0, shuffle=False, sizes=(2, 2), weights=(1.0, 1e-20))
    assert order.rows(0, 4).tolist() == [0, 1, 0, 1]
