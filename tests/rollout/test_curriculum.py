"""Prompts from which nothing was learned come less often, the same ones again in a resumed run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.run.data.prompt_stream import PromptStream
from rlcore.spi import CheckpointError
from rlcore_rollout.curriculum import Curriculum


def order(num_rows, batch_size, seed=0):
    return PromptStream(num_rows=num_rows, batch_size=batch_size, seed=seed, shuffle=True)


def flat_numbers(step, rows, flat):
    """What `learn` is told of a step's groups."""
    return {step * len(rows) + place: row not in flat for place, row in enumerate(rows.tolist())}


def counts_of(curriculum, num_rows, num_steps, flat):
    counts = np.zeros(num_rows, np.int64)
    for step in range(num_steps):
        rows = curriculum.indices(step)
        np.add.at(counts, rows, 1)
        curriculum.learn(flat_numbers(step, rows, flat), {})
    return counts


def test_rows_without_variance_come_by_their_weight():
    flat = set(range(10))
    counts = counts_of(Curriculum(order(40, 8), 0.25), 40, 600, flat)
    ratio = counts[:10].mean() / counts[10:].mean()
    assert ratio == pytest.approx(0.25, abs=0.05)
    assert counts.sum() == 600 * 8


def test_a_row_that_is_learned_from_again_comes_as_often_as_before():
    curriculum = Curriculum(order(8, 8), 0.01)
    curriculum.learn(flat_numbers(0, curriculum.indices(0), flat={0}), {})
    assert curriculum.num_without_variance == 1
    step = next(step for step in range(1, 500) if 0 in curriculum.indices(step))
    curriculum.learn(flat_numbers(step, curriculum.indices(step), flat=set()), {})
    assert curriculum.num_without_variance == 0


def test_steps_are_filled_where_no_row_has_any_variance():
    counts = counts_of(Curriculum(order(6, 4), 1e-9), 6, 30, set(range(6)))
    assert counts.sum() == 120
    assert counts.min() > 5


@given(seed=st.integers(0, 2**31), cut=st.integers(1, 9), num_rows=st.integers(1, 20), batch_size=st.integers(1, 8))
def test_what_was_saved_goes_on_as_if_it_had_not_been(seed, cut, num_rows, batch_size):
    flat = set(range(0, num_rows, 2))
    whole = Curriculum(order(num_rows, batch_size, seed), 0.3)
    expected = []
    for step in range(10):
        rows = whole.indices(step)
        expected.append((rows.tolist(), whole.following(step).tolist()))
        if step == cut:
            saved = whole.state()  # in the midst of a step, whose rows are chosen
        whole.learn(flat_numbers(step, rows, flat), {})
        whole.forget_before(step)
    again = Curriculum(order(num_rows, batch_size, seed), 0.3)
    again.begin(0, saved)
    for step in range(cut, 10):
        rows = again.indices(step)
        assert (rows.tolist(), again.following(step).tolist()) == expected[step]
        again.learn(flat_numbers(step, rows, flat), {})


def test_without_anything_learned_the_order_is_the_usual_one():
    plain = order(10, 4)
    curriculum = Curriculum(plain, 0.5)
    curriculum.begin(3, None)
    assert curriculum.indices(3).tolist() == plain.indices(3).tolist()
    assert sorted(curriculum.following(3).tolist()) == list(range(10))
    with pytest.raises(CheckpointError, match="knows of 10 prompts"):
        Curriculum(order(9, 4), 0.5).begin(3, curriculum.state())
