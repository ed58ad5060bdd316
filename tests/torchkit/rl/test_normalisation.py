"""What each token counts, against the three definitions sequence by sequence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import GlobalCounts
from rlcore_torchkit.rl.policy_gradient import token_weights
from rlcore_torchkit.rl.sequences import Sequences

NORMALISATIONS = ("token", "sequence", "constant")
CONSTANT = 13

batches = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6)
"""The loss mask of each sequence; some have no loss token."""


def weights_of(sequences, normalisation, counts=None):
    mask = np.concatenate(sequences)
    num_loss_sequences = sum(any(sequence) for sequence in sequences)
    counts = counts or GlobalCounts(num_loss_tokens=int(mask.sum()), num_loss_sequences=num_loss_sequences)
    found = token_weights(
        normalisation,
        sequences=Sequences(torch.tensor(mask), torch.tensor(np.cumsum([0, *map(len, sequences)]))),
        counts=counts,
        constant_length=CONSTANT,
        dtype=torch.float64,
    )
    return found.numpy(), counts


def expected_weight(sequence, normalisation, counts):
    match normalisation:
        case "token":
            return 1 / counts.num_loss_tokens
        case "sequence":
            return 1 / sum(sequence) / counts.num_loss_sequences
        case "constant":
            return 1 / CONSTANT / counts.num_loss_sequences


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@settings(max_examples=25)
@given(sequences=batches)
def test_every_token_counts_as_defined(normalisation, sequences):
    found, counts = weights_of(sequences, normalisation)
    expected = [
        expected_weight(sequence, normalisation, counts) if inside else 0.0 for sequence in sequences for inside in sequence
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@settings(max_examples=25)
@given(sequences=batches, data=st.data())
def test_a_token_counts_the_same_in_any_microbatch(normalisation, sequences, data):
    whole, counts = weights_of(sequences, normalisation)
    cut = data.draw(st.integers(0, len(sequences)))
    parts = [weights_of(part, normalisation, counts)[0] for part in (sequences[:cut], sequences[cut:]) if part]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_without_a_loss_token_all_of_them_are_zero(normalisation):
    found, _ = weights_of([[False, False], [False]], normalisation)
    assert found.tolist() == [0.0] * 3
