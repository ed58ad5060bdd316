"""Samples are dealt to engines in equal shares."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rlcore_vllm.replicas.request_dispatch import dispatch, work_of

from .conftest import request_of


@given(
    lengths=st.lists(st.integers(1, 20), max_size=12),
    num_samples=st.integers(0, 9),
    busy=st.lists(st.integers(0, 99), min_size=1, max_size=5),
)
def test_every_sample_is_dealt_to_one_engine_with_its_own_prompt_images_seed_and_limit(lengths, num_samples, busy):
    images = tuple((bytes([index]),) * (index % 3) for index in range(len(lengths)))
    request = evolve(request_of(lengths, num_samples), images=images)
    limits = np.arange(1, len(request.seeds) + 1, dtype=np.int32)
    parts = dispatch(request, limits, busy)
    assert len(parts) == len(busy)
    numbers = np.concatenate([part.numbers for part in parts])
    assert sorted(numbers.tolist()) == list(range(len(request.seeds)))
    for part in parts:
        assert part.seeds.tolist() == request.seeds[part.numbers].tolist()
        assert part.limits.tolist() == limits[part.numbers].tolist()
        for number, prompt in zip(part.numbers.tolist(), part.prompt_of.tolist(), strict=True):
            assert part.prompts.sequence(prompt).tolist() == request.prompts.sequence(number // num_samples).tolist()
            assert part.images[prompt] == images[number // num_samples]
        assert (np.diff(part.prompt_of) >= 0).all(), "samples of one prompt are not adjacent"


def test_samples_of_a_prompt_stay_together_where_there_are_enough_prompts():
    parts = dispatch(request_of([3] * 16, 8), np.full(128, 8, np.int32), [0, 0])
    assert [part.prompts.num_sequences for part in parts] == [8, 8]


@pytest.mark.parametrize("num_prompts", [1, 3, 32])
def test_engines_get_equal_work(num_prompts):
    random = np.random.default_rng(0)
    request = request_of(random.integers(1, 60, num_prompts).tolist(), 8)
    limits = random.integers(1, 200, len(request.seeds), dtype=np.int32)
    work = [int(part.limits.sum()) for part in dispatch(request, limits, [0, 0])]
    assert max(work) < 1.35 * min(work)


def test_an_engine_with_work_under_way_gets_less():
    request = request_of([4] * 12, 2)
    limits = np.full(24, 8, np.int32)
    assert [len(part.numbers) for part in dispatch(request, limits, [0, 10_000, 0])] == [12, 0, 12]
    behind = int(work_of(request, limits)[:4].sum())
    assert [len(part.numbers) for part in dispatch(request, limits, [behind, 0])] == [10, 14]


def test_work_is_that_of_prompt_and_response():
    assert work_of(request_of([4, 1], 2), np.array([8, 2, 3, 4])).tolist() == [12, 6, 4, 5]


def test_a_conversation_stays_on_the_engine_that_had_it_unless_that_has_much_more_to_do():
    request = evolve(request_of([4] * 4, 1), conversations=np.array([8, 9, -1, 7]))
    limits = np.full(4, 8, np.int32)
    places = {8: 2, 9: 2, 7: 0}
    assert [part.numbers.tolist() for part in dispatch(request, limits, [200, 0, 0], places)] == [[], [2, 3], [0, 1]]
    assert [part.numbers.tolist() for part in dispatch(request, limits, [0, 0, 500], places)] == [[0, 2, 3], [1], []]
