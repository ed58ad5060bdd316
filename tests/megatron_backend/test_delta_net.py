"""Gated delta nets over packed sequences against their recurrence; test_layout compares whole models with transformers."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from megatron_families import make_own
from megatron_weights_cases import opened
from torch.nn import functional as F

from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.modules.delta_net import DeltaNet, convolved, delta_rule
from rlcore_torchkit.layers.attention import PackedSequences

OFFSETS = torch.tensor([0, 5, 6, 75])
"""Sequences shorter than the convolution's kernel, and longer than a chunk of the rule."""
NUM_TOKENS = int(OFFSETS[-1])


@pytest.fixture(scope="module")
def packed() -> PackedSequences:
    return PackedSequences.from_offsets(OFFSETS, torch.device("cpu"))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_sequence(compute: Callable[..., torch.Tensor], *states: torch.Tensor) -> torch.Tensor:
    bounds = OFFSETS.tolist()
    return torch.cat([compute(*(state[begin:end] for state in states)) for begin, end in pairwise(bounds)])


def test_a_convolution_sees_no_other_sequence(packed: PackedSequences) -> None:
    states, weight = drawn(NUM_TOKENS, 6), drawn(6, 4)

    def alone(rows: torch.Tensor) -> torch.Tensor:
        return F.conv1d(F.pad(rows.t()[None], (3, 0)), weight[:, None], groups=6)[0].t()

    torch.testing.assert_close(convolved(states, weight, packed), by_sequence(alone, states), atol=1e-5, rtol=1e-5)


def recurrence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """S' = exp(g) S + k (beta (v - exp(g) Sᵀ k))ᵀ and o = Sᵀ q / √D, token by token (arXiv:2412.06464, equation 10)."""
    shared = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(shared, 1) * query.shape[-1] ** -0.5, key.repeat_interleave(shared, 1)
    state, outputs = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1]), []
    for token in range(len(value)):
        state = state * decay[token].exp()[:, None, None]
        told = torch.einsum("hde,hd->he", state, key[token])
        state = state + key[token][..., None] * (beta[token][:, None] * (value[token] - told))[:, None]
        outputs.append(torch.einsum("hde,hd->he", state, query[token]))
    return torch.stack(outputs)


def test_the_rule_is_its_recurrence_in_each_sequence(packed: PackedSequences) -> None:
    query, key = (F.normalize(drawn(NUM_TOKENS, 2, width), dim=-1) for width in (8, 8))
    states = query, key, drawn(NUM_TOKENS, 4, 5), -drawn(NUM_TOKENS, 4).exp(), drawn(NUM_TOKENS, 4).sigmoid()
    torch.testing.assert_close(delta_rule(*states, packed), by_sequence(recurrence, *states), atol=1e-5, rtol=1e-4)


def test_layers_of_the_listed_kinds_are_delta_nets(tmp_path: Path) -> None:
    """Of the second of two parts too: Megatron's specification is one object for all layers."""
    with opened(make_own(tmp_path / "model", "qwen3_5_text", num_hidden_layers=3), ParallelLayout()) as model:
        kinds = [isinstance(layer.self_attention, DeltaNet) for part in model.parts for layer in part.decoder.layers]
    assert kinds == [True, False, True]
