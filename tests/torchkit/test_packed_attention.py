"""Windows, sinks, soft caps and uneven widths against the formulas in float64."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlcore.spi import ContractError
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import count_windows, packed_attention, plain_attention

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 6, 5
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)
SPECIAL = st.fixed_dictionaries(
    {"sliding_window": st.sampled_from([None, 1, 3]), "softcap": st.sampled_from([None, 0.7]), "sinks": st.booleans()}
)


def random_states(lengths, seed):
    random, num_tokens = torch.Generator().manual_seed(seed), sum(lengths)
    shapes = ((HEADS, num_tokens, WIDTH), (KEY_HEADS, num_tokens, WIDTH), (KEY_HEADS, num_tokens, VALUE_WIDTH), (HEADS,))
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def bounds(lengths):
    return PackedSequences.from_offsets(np.cumsum([0, *lengths]), "cpu")


def by_definition(lengths, query, key, value, sinks, scaling, window, softcap):
    """One query of one head at a time."""
    output = query.new_zeros(sum(lengths), HEADS, VALUE_WIDTH)
    starts = np.cumsum([0, *lengths])
    for start, end in itertools.pairwise(starts):
        for head in range(HEADS):
            group = head // (HEADS // KEY_HEADS)
            for place in range(start, end):
                first = start if window is None else max(start, place - window + 1)
                scores = key[group, first : place + 1] @ query[head, place] * scaling
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].exp())
                output[place, head] = weights @ value[group, first : place + 1] / total
    return output


@settings(max_examples=15)
@given(LENGTHS, SPECIAL, st.integers(0, 2**31))
def test_equals_the_formulas(lengths, special, seed):
    query, key, value, sinks = random_states(lengths, seed)
    sinks = sinks if special["sinks"] else None
    window, softcap = special["sliding_window"], special["softcap"]
    output, weights = packed_attention(
        nn.Module(),
        *(states[None] for states in (query, key, value)),
        None,
        packed=bounds(lengths),
        scaling=0.4,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    assert weights is None
    expected = by_definition(lengths, query, key, value, sinks, 0.4, window, softcap)
    torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-6 if softcap or sinks is not None else 1e-12)


def test_the_plain_kernel_equals_the_formulas():
    lengths = [3, 7, 1]
    query, key, value, _ = random_states(lengths, 3)
    expected = by_definition(lengths, query, key, value, None, WIDTH**-0.5, None, None)
    fused = torch.backends.cuda.flash_sdp_enabled()
    with plain_attention():
        assert not torch.backends.cuda.flash_sdp_enabled()
        output, _ = packed_attention(nn.Module(), query[None], key[None], value[None], None, packed=bounds(lengths))
    assert torch.backends.cuda.flash_sdp_enabled() == fused
    torch.testing.assert_close(output[0], expected)


def test_gradients_reach_all_that_is_given():
    lengths = (3, 5)
    states = [each.requires_grad_() for each in random_states(lengths, 0)]

    def attend(query, key, value, sinks):
        options = {"packed": bounds(lengths), "sliding_window": 3, "softcap": 0.7, "s_aux": sinks}
        return packed_attention(nn.Module(), query[None], key[None], value[None], None, **options)[0]

    assert torch.autograd.gradcheck(attend, states)


def test_rows_of_equal_length_are_packed_in_their_order():
    lengths = (4, 4, 4)
    states = random_states(lengths, 1)[:3]
    rows = [each.view(each.shape[0], 3, 4, -1).transpose(0, 1) for each in states]
    packed, _ = packed_attention(nn.Module(), *(each[None] for each in states), None, packed=bounds(lengths))
    found, _ = packed_attention(nn.Module(), *rows, None, packed=bounds(lengths))
    torch.testing.assert_close(found, packed.view(3, 4, HEADS, VALUE_WIDTH), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"packed": None}, "no `packed`"),
        ({"attention_mask": torch.zeros(1)}, "an attention mask"),
        ({"dropout": 0.1}, "attention dropout"),
        ({"is_causal": False}, "attention to later tokens"),
        ({"packed": bounds((3,))}, "expected 3 tokens"),
    ],
)
def test_what_it_does_not_compute_is_refused(change, found):
    options = {"attention_mask": None, "packed": bounds((4, 2)), **change}
    states = [each[None] for each in random_states((4, 2), 2)[:3]]
    with pytest.raises(ContractError, match=found):
        packed_attention(nn.Module().train(), *states, **options)


def test_layers_with_a_window_are_counted():
    states = [each[None] for each in random_states((4, 2), 3)[:3]]
    with count_windows() as counted:
        for window in (None, 2, 3):
            packed_attention(nn.Module(), *states, None, packed=bounds((4, 2)), sliding_window=window)
    assert counted.count == 2
