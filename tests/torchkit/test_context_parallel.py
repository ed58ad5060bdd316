"""How tokens are divided over context ranks; what several ranks exchange is in fsdp2_backend/test_context_parallel."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.spi import ContractError
from rlcore_torchkit.forward.context_parallel import ContextPart, check_heads, exchanged_attention, part_logprobs
from rlcore_torchkit.head.logprobs import token_logprobs
from rlcore_torchkit.layers.attention import PackedSequences

packings = st.lists(st.integers(1, 11), min_size=1, max_size=6).map(
    lambda lengths: PackedSequences.from_offsets(np.cumsum([0, *lengths]), torch.device("cpu"))
)


class Group:
    """As much of a process group as `ContextPart.of` reads."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._num_ranks


def part_of(packed: PackedSequences, rank: int = 0, num_ranks: int = 1, multiple: int = 1) -> ContextPart:
    return ContextPart.of(packed, Group(rank, num_ranks), multiple)  # type: ignore[arg-type]


@settings(max_examples=50)
@given(packed=packings, num_ranks=st.integers(1, 5), multiple=st.integers(1, 4))
def test_parts_cover_every_token_and_every_prediction_once(packed: PackedSequences, num_ranks: int, multiple: int) -> None:
    parts = [part_of(packed, rank, num_ranks, multiple) for rank in range(num_ranks)]
    (size,) = {part.size for part in parts}
    assert size % multiple == 0
    assert 0 <= num_ranks * size - packed.num_tokens < num_ranks * multiple, "the smallest such parts"
    tokens = torch.arange(1, packed.num_tokens + 1)
    whole = torch.cat([part.split(tokens) for part in parts])
    assert whole.tolist() == [*tokens.tolist(), *[0] * parts[0].num_padding]
    for part in parts:
        inside = (part.predicting() >= part.start) & (part.predicting() < part.start + part.size)
        assert inside.all()
    assert torch.equal(torch.cat([part.predicting() for part in parts]), packed.predicting)


@settings(max_examples=25)
@given(
    packed=packings, multiple=st.integers(1, 4), entropy=st.sampled_from(["none", "metric", "loss"]), seed=st.integers(0, 99)
)
def test_one_rank_has_the_log_probabilities_of_float64(packed: PackedSequences, multiple: int, entropy: Any, seed: int) -> None:
    part, generator = part_of(packed, multiple=multiple), torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(part.size, 5, generator=generator), torch.randn(9, 5, generator=generator)
    tokens = torch.randint(9, (packed.num_tokens,), generator=generator)

    def compute(states: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(states, weight, targets, **options)

    logprobs, entropies = part_logprobs(hidden, tokens, part, compute, temperature=0.7, entropy=entropy)
    log_softmax = torch.log_softmax(hidden.double() @ weight.double().T / 0.7, 1)
    expected = torch.zeros(2, packed.num_tokens, dtype=torch.float64)
    for place in packed.predicting.tolist():
        expected[0, place + 1] = log_softmax[place, tokens[place + 1]]
        expected[1, place + 1] = -(log_softmax[place].exp() * log_softmax[place]).sum()
    torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-5, rtol=1e-5)
    assert (entropies is None) == (entropy == "none")
    if entropies is not None:
        torch.testing.assert_close(entropies.double(), expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("multiple", [1, 4])
def test_one_rank_attends_to_its_tokens_and_not_to_the_padding(multiple: int) -> None:
    part = part_of(PackedSequences.from_offsets(np.array([0, 6, 9]), torch.device("cpu")), multiple=multiple)
    states = [torch.full((part.size, heads, 3), float("nan")) for heads in (4, 2, 2)]
    for state in states:
        state[:9] = 2.0

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query.shape[0] == key.shape[0] == value.shape[0] == 9
        return query + 1.0

    found = exchanged_attention(*states, part, attend)
    assert torch.equal(found[:9], torch.full((9, 4, 3), 3.0))
    assert not found[9:].any()


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(3, 3, 2), (4, 3, 2), (8, 2, 3)])
def test_heads_that_ranks_cannot_share_are_refused(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    check_heads(12, 4, 3)
    with pytest.raises(ContractError, match=f"{num_heads} query heads; .* {num_kv_heads} key"):
        check_heads(num_heads, num_kv_heads, num_ranks)
