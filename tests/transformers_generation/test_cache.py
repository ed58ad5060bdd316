"""Attention of prompts and of places in the cache against the formula in float64, one sequence at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from rlcore_transformers.cache import LENGTH_STEP, PromptAttention, SlotAttention, SlotCache

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, NUM_LAYERS = 4, 2, 8, 2


def draw(num_rows, seed):
    """Query [R, A, D], key and value [R, K, D] of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_rows, heads, HEAD_SIZE, generator=generator) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


def attended(query, keys, values):
    """float64 [A * D]: one query [A, D] over keys and values [tokens, K, D], as the formula says."""
    found = []
    for head in range(NUM_HEADS):
        shared = head // (NUM_HEADS // NUM_KV_HEADS)
        scores = keys[:, shared].double() @ query[head].double() / HEAD_SIZE**0.5
        found.append(scores.softmax(0) @ values[:, shared].double())
    return torch.cat(found)


def make_cache(num_slots, length, dtype=torch.float32):
    config = Qwen3Config(num_hidden_layers=NUM_LAYERS, num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_KV_HEADS)
    return SlotCache(config, num_slots, length, (NUM_KV_HEADS, HEAD_SIZE), dtype, torch.device("cpu"))


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_prompts_tokens_see_themselves_and_what_came_before(lengths, seed):
    longest = max(lengths)
    query, key, value = draw(len(lengths) * longest, seed)
    found = PromptAttention(len(lengths), longest)(0, query, key, value)
    for prompt, length in enumerate(lengths):
        rows = slice(prompt * longest, prompt * longest + length)
        for place in range(length):
            expected = attended(query[rows][place], key[rows][: place + 1], value[rows][: place + 1])
            torch.testing.assert_close(found[rows][place].double(), expected, atol=1e-5, rtol=1e-5)


def test_lengths_are_rounded_up_so_that_similar_requests_share_a_cache():
    cache = make_cache(3, LENGTH_STEP + 1)
    assert cache.length == 2 * LENGTH_STEP
    assert cache.num_bytes == 2 * NUM_LAYERS * 3 * NUM_KV_HEADS * 2 * LENGTH_STEP * HEAD_SIZE * 4
    assert make_cache(3, LENGTH_STEP).length == LENGTH_STEP


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99), data=st.data())
def test_a_new_token_sees_all_that_its_place_holds_and_nothing_else(dtype, tolerance, lengths, seed, data):
    """Whatever a sequence before left in the places; where a sequence has moved from one to another."""
    longest, count, spare = max(lengths), len(lengths), 2
    cache = make_cache(count + spare, longest + 1, dtype)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    order = torch.tensor(data.draw(st.permutations(range(count))))
    prompts = PromptAttention(count, longest)
    states = [[part.to(dtype) for part in draw(count * longest, seed + layer)] for layer in range(NUM_LAYERS)]
    for layer, parts in enumerate(states):
        prompts(layer, *parts)
    cache.fill(spare, prompts, order)
    gaps = torch.arange(min(spare, count))
    cache.move(spare + count - 1 - gaps, gaps, longest)  # the last ones come first
    places = [*(spare + count - 1 - gaps).tolist(), *range(len(gaps), spare), *range(spare, spare + count - len(gaps))]
    held = {slot: int(order[place - spare]) for slot, place in enumerate(places) if place >= spare}
    num_rows = max(held) + 1
    positions = torch.tensor([lengths[held[slot]] if slot in held else 0 for slot in range(num_rows)])
    attention = SlotAttention(cache, positions, int(positions.max()) + 1)
    for layer in range(NUM_LAYERS):
        query, key, value = (part.to(dtype) for part in draw(num_rows, seed + 50 + layer))
        found = attention(layer, query, key, value)
        for slot, prompt in held.items():
            rows = slice(prompt * longest, prompt * longest + lengths[prompt])
            keys, values = (torch.cat([states[layer][n][rows], new[slot][None]]) for n, new in ((1, key), (2, value)))
            error = (found[slot].double() - attended(query[slot], keys, values)).abs().max()
            assert error < tolerance


def test_what_it_holds_moves_into_a_larger_one():
    small, large = make_cache(2, 10), make_cache(5, LENGTH_STEP + 1)
    for pool in (small.keys, small.values):
        for layer in pool:
            layer.copy_(torch.randn(layer.shape))
    large.take(small, 2, 10)
    for mine, theirs in zip((*large.keys, *large.values), (*small.keys, *small.values), strict=True):
        torch.testing.assert_close(mine[:2, :, :10], theirs[:2, :, :10])
        assert not mine[2:].any()
        assert not mine[:, :, 10:].any()
