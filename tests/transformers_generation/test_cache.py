"""What the cache holds of prompts, where, and how large it is."""

from types import SimpleNamespace

import pytest
import torch

from rlcore_transformers.cache import LENGTH_STEP, SlotCache

NUM_PROMPTS, LENGTH = 3, 10
SHAPES = (((2, 8), (2, 8)), ((4, 6), (4, 5)))
"""Heads and sizes of keys and values, by layer."""


@pytest.fixture
def prompts():
    """What two layers computed of three prompts."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        [torch.randn(NUM_PROMPTS, heads, LENGTH, size, generator=generator) for heads, size in kind]
        for kind in zip(*SHAPES, strict=True)
    )
    return SimpleNamespace(length=LENGTH, keys=keys, values=values, states=[])


def test_lengths_are_rounded_up_so_that_similar_requests_share_a_cache(prompts):
    cache = SlotCache(3, LENGTH_STEP + 1)
    assert (cache.length, cache.num_bytes) == (2 * LENGTH_STEP, 0)
    cache.fill(0, prompts, torch.tensor([0]))
    a_token = sum(heads * size for layer in SHAPES for heads, size in layer)
    assert cache.num_bytes == 3 * 2 * LENGTH_STEP * a_token * 4
    assert SlotCache(3, LENGTH_STEP).length == LENGTH_STEP


def test_prompts_are_copied_into_places(prompts):
    cache = SlotCache(4, LENGTH)
    cache.fill(1, prompts, torch.tensor([2, 0, 2]))
    for mine, theirs in zip((*cache.keys, *cache.values), (*prompts.keys, *prompts.values), strict=True):
        torch.testing.assert_close(mine[1:, :, :LENGTH], theirs[[2, 0, 2]], atol=0, rtol=0)
        assert not mine[0].any()
        assert not mine[:, :, LENGTH:].any()


def test_states_go_where_their_sequences_go(prompts):
    """Of a model without attention there are no keys."""
    states = torch.arange(NUM_PROMPTS * 2.0).view(NUM_PROMPTS, 2)
    cache, larger = SlotCache(4, LENGTH), SlotCache(5, LENGTH)
    cache.fill(1, SimpleNamespace(length=LENGTH, keys=[], values=[], states=[states]), torch.tensor([2, 0]))
    cache.move(torch.tensor([2]), torch.tensor([0]), LENGTH)
    assert torch.equal(cache.states[0][:2], states[[0, 2]])
    larger.take(cache, 2, LENGTH)
    assert torch.equal(larger.states[0][:2], states[[0, 2]])
    assert larger.num_bytes == 5 * 2 * 4


def test_what_it_holds_moves_into_a_larger_one(prompts):
    small, large = SlotCache(3, LENGTH), SlotCache(5, LENGTH_STEP + 1)
    small.fill(0, prompts, torch.arange(3))
    large.take(small, 2, LENGTH)
    for mine, theirs in zip((*large.keys, *large.values), (*small.keys, *small.values), strict=True):
        torch.testing.assert_close(mine[:2, :, :LENGTH], theirs[:2, :, :LENGTH], atol=0, rtol=0)
        assert mine.shape[2] == large.length
        assert not mine[2:].any()
        assert not mine[:, :, LENGTH:].any()
