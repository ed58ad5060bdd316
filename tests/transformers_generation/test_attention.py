"""Attention of prompts and of places in the cache against the formula in float64, one sequence at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.layers.packed_attention import PLAIN, Scores
from rlcore_transformers.attention import PromptAttention, SlotAttention
from rlcore_transformers.cache import SlotCache

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, VALUE_SIZE, NUM_LAYERS = 4, 2, 8, 6, 2
FORMS = {
    "plain": PLAIN,
    "scaled": Scores(scaling=0.7),
    "windows": Scores(window=3),
    "capped": Scores(scaling=0.9, softcap=0.8),
    "sinks": Scores(window=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


def draw(num_rows, seed):
    """Query [R, A, D], key [R, K, D] and value [R, K, E] of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((NUM_HEADS, HEAD_SIZE), (NUM_KV_HEADS, HEAD_SIZE), (NUM_KV_HEADS, VALUE_SIZE))
    return [torch.randn(num_rows, *shape, generator=generator) for shape in shapes]


def attended(query, keys, values, form=PLAIN):
    """float64 [A * E]: the last query [A, D] over keys and values [tokens, K, ...], as the formula says."""
    found = []
    if form.window is not None:
        keys, values = keys[-form.window :], values[-form.window :]
    for head in range(NUM_HEADS):
        shared = head // (NUM_HEADS // NUM_KV_HEADS)
        scores = keys[:, shared].double() @ query[head].double() * (form.scaling or 1 / math.sqrt(HEAD_SIZE))
        if form.softcap:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        weights = scores.exp()
        sink = 0.0 if form.sinks is None else form.sinks[head].double().exp()
        found.append((weights / (weights.sum() + sink)) @ values[:, shared].double())
    return torch.cat(found)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_prompts_tokens_see_themselves_and_what_came_before(form, lengths, seed):
    longest = max(lengths)
    query, key, value = draw(len(lengths) * longest, seed)
    found = PromptAttention(len(lengths), longest)(0, query, key, value, FORMS[form])
    for prompt, length in enumerate(lengths):
        rows = slice(prompt * longest, prompt * longest + length)
        for place in range(length):
            expected = attended(query[rows][place], key[rows][: place + 1], value[rows][: place + 1], FORMS[form])
            torch.testing.assert_close(found[rows][place].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99), data=st.data())
def test_a_new_token_sees_all_that_its_place_holds_and_nothing_else(form, dtype, tolerance, lengths, seed, data):
    """Whatever a sequence before left in the places; where a sequence has moved from one to another."""
    longest, count, spare = max(lengths), len(lengths), 2
    cache = SlotCache(count + spare, longest + 1)
    order = torch.tensor(data.draw(st.permutations(range(count))))
    prompts = PromptAttention(count, longest)
    states = [[part.to(dtype) for part in draw(count * longest, seed + layer)] for layer in range(NUM_LAYERS)]
    for layer, parts in enumerate(states):
        prompts(layer, *parts)
    cache.fill(spare, prompts, order)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
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
        found = attention(layer, query, key, value, FORMS[form])
        for slot, prompt in held.items():
            rows = slice(prompt * longest, prompt * longest + lengths[prompt])
            keys, values = (torch.cat([states[layer][n][rows], new[slot][None]]) for n, new in ((1, key), (2, value)))
            error = (found[slot].double() - attended(query[slot], keys, values, FORMS[form])).abs().max()
            assert error < tolerance
