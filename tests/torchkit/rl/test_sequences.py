"""Sums over sequences against numpy, one sequence at a time."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.rl.sequences import Sequences

masks = st.lists(st.lists(st.booleans(), min_size=0, max_size=6), min_size=1, max_size=6)
"""The loss mask of each sequence; some have no loss token, some no token."""


def packed(masks, seed=0):
    """The sequences, and values that are nan outside the mask."""
    mask = np.concatenate([np.array(each, bool) for each in masks])
    values = np.where(mask, np.random.default_rng(seed).normal(size=len(mask)), np.nan)
    return Sequences(torch.tensor(mask), torch.tensor(np.cumsum([0, *map(len, masks)]))), values


@settings(max_examples=25)
@given(masks=masks, seed=st.integers(0, 10**6))
def test_each_sequence_has_its_own_sum_mean_and_number_of_tokens(masks, seed):
    sequences, values = packed(masks, seed)
    pieces = np.split(values, np.cumsum([len(each) for each in masks])[:-1])
    inside = [piece[~np.isnan(piece)] for piece in pieces]
    assert sequences.num_tokens.tolist() == [len(piece) for piece in inside]
    np.testing.assert_allclose(sequences.sum(torch.tensor(values)), [piece.sum() for piece in inside], atol=1e-12)
    means = [piece.mean() if len(piece) else 0.0 for piece in inside]
    np.testing.assert_allclose(sequences.mean(torch.tensor(values)), means, atol=1e-12)


@settings(max_examples=25)
@given(masks=masks)
def test_a_sequences_value_is_spread_over_all_of_its_tokens(masks):
    sequences, _ = packed(masks)
    numbers = torch.arange(len(masks))
    assert sequences.spread(numbers).tolist() == [i for i, each in enumerate(masks) for _ in each]


def test_the_gradient_of_a_mean_is_each_tokens_share():
    sequences, values = packed([[True, False, True, True], [False], [True]])
    leaf = torch.tensor(values, requires_grad=True)
    (sequences.spread(sequences.mean(leaf)) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 7.0])).sum().backward()
    np.testing.assert_allclose(leaf.grad, [10 / 3, 0, 10 / 3, 10 / 3, 0, 7])


def test_a_long_batch_costs_a_late_sequence_no_digits():
    """A difference of running sums would."""
    sequences, _ = packed([[True] * 4000, [True] * 2])
    values = torch.tensor([1e6] * 4000 + [1e-3, 2e-3])
    assert sequences.sum(values)[1].item() == np.float32(1e-3) + np.float32(2e-3)
