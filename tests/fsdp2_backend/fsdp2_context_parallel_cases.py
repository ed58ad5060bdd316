"""What each context rank does in the tests of test_context_parallel."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsdp2_group_cases import Cases, Place, assert_close_everywhere, quickly
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlcore.spi import ContractError, ModelSpec
from rlcore_fsdp2.context_parallel import context_attention, patch_context
from rlcore_torchkit.forward.context_parallel import ContextPart
from rlcore_torchkit.head.logprobs import packed_logprobs, patch_head
from rlcore_torchkit.huggingface.models import load_model
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import packed_attention

CASES = Cases()
CPU = torch.device("cpu")


def packings() -> st.SearchStrategy[PackedSequences]:
    """Few and many sequences, single tokens among them; the number of tokens need not be divisible by the ranks."""
    lengths = st.lists(st.integers(1, 11), min_size=1, max_size=6)
    return lengths.map(lambda drawn: PackedSequences.from_offsets(np.cumsum([0, *drawn]), CPU))


@CASES.add
def attention_equals_one_process(place: Place) -> None:
    @quickly
    @given(packings(), st.sampled_from([(4, 1), (4, 2), (8, 4), (8, 8), (12, 6)]), st.integers(7, 8), st.integers(0, 9))
    def check(packed: PackedSequences, heads: tuple[int, int], value_width: int, seed: int) -> None:
        generator, num_tokens = torch.Generator().manual_seed(seed), packed.num_tokens
        widths = ((heads[0], 8), (heads[1], 8), (heads[1], value_width))
        shapes = [(1, count, num_tokens, width) for count, width in widths]
        whole = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
        weight = torch.randn(1, num_tokens, heads[0], value_width, generator=generator)
        expected, _ = packed_attention(nn.Identity(), *whole, None, packed=packed, scaling=0.3)
        (expected * weight).sum().backward()

        context = ContextPart.of(packed, place.group)
        parts = [_part(context, states.detach(), 2).requires_grad_() for states in whole]
        options = {"packed": packed, "context": context, "scaling": 0.3}
        found, _ = context_attention(nn.Identity(), *parts, None, **options)
        (found * _part(context, weight, 1)).sum().backward()
        pairs = [("output", found, _part(context, expected, 1))]
        pairs += [(f"grad {n}", parts[n].grad, _part(context, whole[n].grad, 2)) for n in range(3)]
        assert_close_everywhere(pairs)

    check()


def _part(context: ContextPart, states: Tensor, dim: int) -> Tensor:
    return context.split(states.detach().movedim(dim, -1)).movedim(-1, dim).contiguous()


def add_model_case(architecture: str, entropy: str) -> None:
    def logprobs_and_gradients_equal_one_process(place: Place) -> None:
        spec = ModelSpec(path=str(place.models / architecture))
        whole, split = (load_model(spec, dtype=torch.float32) for _ in range(2))
        for model in (whole, split):
            patch_head(model)
        patch_context(split, place.group)

        @settings(quickly, max_examples=5)
        @given(packings(), st.integers(0, 9))
        def check(packed: PackedSequences, seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, 100, (packed.num_tokens,), generator=generator)
            weights = torch.randn(2, packed.num_tokens, generator=generator)
            results = []
            for model in (whole, split):
                model.zero_grad()
                values = packed_logprobs(model, tokens, packed, temperature=1.3, entropy=entropy)
                results.append(values)
                present = torch.stack([value for value in values if value is not None])
                (present * weights[: len(present)]).sum().div(10.0).backward()
            pairs = [(f"value {n}", *pair) for n, pair in enumerate(zip(*results, strict=True)) if pair[0] is not None]
            for (name, expected), found in zip(whole.named_parameters(), split.parameters(), strict=True):
                dist.all_reduce(found.grad)
                pairs.append((name, found.grad, expected.grad))
            assert_close_everywhere(pairs)

        check()

    CASES[f"logprobs_and_gradients_equal_one_process/{architecture}-{entropy}"] = logprobs_and_gradients_equal_one_process


add_model_case("qwen2", "none")
add_model_case("qwen3", "loss")
add_model_case("qwen3_moe", "metric")


@CASES.add
def heads_that_do_not_divide_are_refused(place: Place) -> None:
    packed = PackedSequences.from_offsets(np.array([0, 8]), CPU)
    context = ContextPart.of(packed, place.group)
    states = [torch.zeros(1, 3, context.size, 8)] * 3
    with pytest.raises(ContractError, match=f"3 query heads; .* {place.num_ranks} context"):
        context_attention(nn.Identity(), *states, None, context=context, packed=packed)


@CASES.add
def calls_without_a_split_are_refused(place: Place) -> None:
    with pytest.raises(ContractError, match="no `context` argument"):
        context_attention(nn.Identity(), *[torch.zeros(1, 4, 2, 8)] * 3, None)
    part = ContextPart.of(PackedSequences.from_offsets(np.array([0, 8]), CPU), place.group)
    model = load_model(ModelSpec(path=str(place.models / "qwen3")), dtype=torch.float32)
    patch_head(model)
    patch_context(model, place.group)
    with pytest.raises(ContractError, match=r"found shape \[7\]; expected \[8\]"):
        model(input_ids=torch.zeros(7, dtype=torch.long), packed=part.packed, temperature=1.0, entropy="none")
