"""Beginnings computed once, against each sequence run alone by plain transformers, and against a table of all beginnings."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit import shared_prefixes
from rlcore_torchkit.attention import PackedSequences, packed_forward
from rlcore_torchkit.shared_prefixes import common_beginnings, shared_forward

PROMPT = 12
GROUPS = {"of several lengths": [[2, 9, 40], [0, 1], [6, 6, 1, 30], [25]], "of one length": [[7, 7, 7, 7], [7, 7]]}
"""Tokens of each response, by prompt."""


def samples(groups: list[list[int]], *, seed: int = 0, vocabulary: int = 100) -> tuple[torch.Tensor, np.ndarray]:
    """Packed tokens int32 [T] and offsets: PROMPT tokens for each group, and random responses behind them."""
    rng = np.random.default_rng(seed)
    sequences = []
    for responses in groups:
        prompt = rng.integers(0, vocabulary, PROMPT)
        sequences += [np.concatenate([prompt, rng.integers(0, vocabulary, length)]) for length in responses]
    offsets = np.cumsum([0, *map(len, sequences)]).astype(np.int64)
    return torch.from_numpy(np.concatenate(sequences).astype(np.int32)), offsets


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_states_and_gradients_equal_those_of_each_sequence_alone(
    architecture: str, groups: list[list[int]], packed_model: Callable, plain_model: Callable
) -> None:
    tokens, offsets = samples(groups)
    ours, plain = packed_model(architecture), plain_model(architecture)
    found = ours.lm_head(shared_forward(ours, tokens, PackedSequences.from_offsets(offsets, "cpu")))
    expected = torch.cat([plain(tokens[None, start:end].long()).logits[0] for start, end in pairwise(offsets)])
    assert (found - expected).abs().max() < 1e-5

    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / len(tokens)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for (name, ours_of), (_, theirs) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours_of.grad, theirs.grad, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@settings(max_examples=200, deadline=None)
@given(sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=10))
def test_there_is_one_row_for_each_beginning(sequences: list[list[int]]) -> None:
    offsets = np.cumsum([0, *map(len, sequences)]).astype(np.int64)
    tokens = np.concatenate(sequences).astype(np.int32)
    first, rows = common_beginnings(tokens, offsets)
    beginnings = [tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))]
    assert len(first) == len(set(beginnings)) == rows.max() + 1
    assert [beginnings[token] for token in first[rows]] == beginnings
    assert rows[first].tolist() == list(range(len(first)))


def seen(monkeypatch: pytest.MonkeyPatch, model: Any, tokens: torch.Tensor, offsets: np.ndarray) -> list[int]:
    """How many tokens the model's forward pass was given."""
    counts = []

    def spy(model: Any, tokens: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        counts.append(len(tokens))
        return packed_forward(model, tokens, packed) if tokens.device.type == "cpu" else tokens

    monkeypatch.setattr(shared_prefixes, "packed_forward", spy)
    shared_forward(model, tokens, PackedSequences.from_offsets(offsets, tokens.device))
    return counts


def test_a_prompt_is_computed_once(packed_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, offsets = samples([[20] * 8, [20] * 8])
    assert len(tokens) == 2 * 8 * (PROMPT + 20)
    (count,) = seen(monkeypatch, packed_model("qwen3"), tokens, offsets)
    random_repeats = 16
    assert 2 * (PROMPT + 8 * 20) - random_repeats < count <= 2 * (PROMPT + 8 * 20)


def test_sequences_with_little_in_common_stay_as_they_are(packed_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, offsets = samples([[20]] * 4)
    assert seen(monkeypatch, packed_model("qwen3"), tokens, offsets) == [len(tokens)]


def test_other_devices_compute_every_token(packed_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, offsets = samples([[20] * 8])
    assert seen(monkeypatch, None, tokens.to("meta"), offsets) == [len(tokens)]
