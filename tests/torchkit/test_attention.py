"""Packed attention against each sequence run alone by plain transformers."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from rlcore.spi import ContractError
from rlcore_torchkit.head import logprobs
from rlcore_torchkit.head.logprobs import common_beginnings, packed_forward, shared_forward
from rlcore_torchkit.layers.attention import PackedSequences, SharedSequences
from rlcore_torchkit.layers.packed_attention import PACKED_ATTENTION, packed_attention, register_packed_attention

from .largest_tensor import LargestTensor

LENGTHS = {
    "mixed": [5, 17, 1, 60, 3, 17, 2],
    "equal": [12, 12, 12],
    "single": [33],
    "first tokens only": [1, 1, 1],
    "skewed": [2] * 20 + [150],
}
PROMPT = 12
GROUPS = {"of several lengths": [[2, 9, 40], [0, 1], [6, 6, 1, 30], [25]], "of one length": [[7, 7, 7, 7], [7, 7]]}
"""Tokens of each response, by prompt."""
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
shared_fixtures = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def plain_logits(model: Any, tokens: Tensor, offsets: np.ndarray) -> Tensor:
    """[T, V]: every sequence in a forward pass of its own."""
    parts = [model(tokens[None, start:end].long()).logits[0] for start, end in itertools.pairwise(offsets)]
    return torch.cat(parts)


def packed_logits(model: Any, tokens: Tensor, offsets: np.ndarray) -> Tensor:
    packed = PackedSequences.from_offsets(offsets, tokens.device)
    return model.lm_head(packed_forward(model, tokens, packed))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_logits_and_gradients_equal_those_of_each_sequence_alone(
    architecture: str, lengths: list[int], packed_model: Callable, plain_model: Callable, pack: Callable
) -> None:
    tokens, offsets = pack(lengths)
    ours, plain = packed_model(architecture), plain_model(architecture)
    found, expected = packed_logits(ours, tokens, offsets), plain_logits(plain, tokens, offsets)
    assert (found - expected).abs().max() < 1e-5

    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / len(tokens)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    expected_gradients = gradients(plain)
    assert gradients(ours).keys() == expected_gradients.keys()
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@shared_fixtures
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), seed=st.integers(0, 100), order=st.randoms())
def test_a_sequence_does_not_depend_on_its_pack(
    lengths: list[int], seed: int, order: Any, packed_model: Callable, pack: Callable
) -> None:
    model = packed_model("qwen3")
    tokens, offsets = pack(lengths, seed=seed)
    shuffled = list(range(len(lengths)))
    order.shuffle(shuffled)
    pieces = [tokens[offsets[n] : offsets[n + 1]] for n in shuffled]
    moved_offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    with torch.no_grad():
        together = packed_logits(model, tokens, offsets)
        moved = packed_logits(model, torch.cat(pieces), moved_offsets)
        alone = packed_logits(model, pieces[0], np.array([0, len(pieces[0])]))
    for place, n in enumerate(shuffled):
        here = moved[moved_offsets[place] : moved_offsets[place + 1]]
        assert (here - together[offsets[n] : offsets[n + 1]]).abs().max() < 1e-5
    assert (alone - moved[: len(pieces[0])]).abs().max() < 1e-5


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_the_plan_places_every_token_once_and_pads_little(lengths: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    packed = PackedSequences.from_offsets(offsets, "cpu")
    if packed.plan is None:
        assert len(set(lengths)) == 1
        return
    places = torch.cat([bucket.gather for bucket in packed.plan.buckets])
    assert torch.equal(places[packed.plan.restore], torch.arange(packed.num_tokens))
    assert sum(bucket.num_sequences for bucket in packed.plan.buckets) == len(lengths)
    # Padding at most a quarter of a sequence, or 16 tokens.
    assert len(places) <= sum(max(length / 0.75, length + 16) for length in lengths)


def test_positions_restart_and_first_tokens_are_not_predicted() -> None:
    packed = PackedSequences.from_offsets(torch.tensor([0, 3, 4, 6]), "cpu")
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.predicting.tolist() == [0, 1, 4]
    assert (packed.max_length, packed.num_tokens, packed.num_sequences) == (3, 6, 3)


def test_no_mask_is_built(packed_model: Callable, pack: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model("qwen2")
    masks = []
    original = F.scaled_dot_product_attention

    def spy(*args: Any, **options: Any) -> Tensor:
        masks.append(options.get("attn_mask"))
        return original(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    tokens, offsets = pack([4, 7])
    packed_logits(model, tokens, offsets)
    assert masks == [None] * model.config.num_hidden_layers
    assert model.config._attn_implementation == PACKED_ATTENTION == register_packed_attention()


def test_memory_is_linear_in_the_pack(pack: Callable) -> None:
    """The largest tensor that attention makes is no more than a few times its input."""
    _, offsets = pack([500, 30, 30, 1, 400, 3])
    packed = PackedSequences.from_offsets(offsets, "cpu")
    query = torch.randn(1, 4, packed.num_tokens, 8, requires_grad=True)
    key, value = torch.randn(2, 1, 2, packed.num_tokens, 8)
    with LargestTensor() as largest:
        output, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packed=packed)
        output.sum().backward()
    assert largest.numel <= 1.5 * query.numel()


def test_autocast_and_checkpointing_change_nothing_but_rounding(packed_model: Callable, pack: Callable) -> None:
    import copy

    model = copy.deepcopy(packed_model("qwen3")).train()
    tokens, offsets = pack([9, 20, 4])
    plain = packed_logits(model, tokens, offsets)
    plain.sum().backward()
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed_logits(model, tokens, offsets).sum().backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
    with torch.autocast("cpu", torch.bfloat16):
        half = packed_logits(model, tokens, offsets)
    half.float().sum().backward()
    assert (half - plain).abs().max() < 0.3


def test_wrong_shapes_are_refused(packed_model: Callable) -> None:
    packed = PackedSequences.from_offsets(np.array([0, 6]), "cpu")
    for forward in (packed_forward, shared_forward):
        with pytest.raises(ContractError, match=r"\[5\]; expected \[6\]"):
            forward(packed_model("llama"), torch.zeros(5, dtype=torch.int32), packed)
        with pytest.raises(ContractError, match=r"\[7\]; expected \[6\]"):
            forward(packed_model("llama"), torch.zeros(7, dtype=torch.int32), packed)
    with pytest.raises(ContractError, match="expected 6 tokens"):
        packed_attention(torch.nn.Identity(), *torch.zeros(3, 1, 2, 5, 8), None, packed=packed)
    for offsets in ([0], [0, 3, 3], [1, 2]):
        with pytest.raises(ContractError):
            PackedSequences.from_offsets(np.array(offsets, np.int64), "cpu")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_on_cuda_logits_and_gradients_equal_float32_on_cpu(
    architecture: str, dtype: torch.dtype, tolerance: float, packed_model: Callable, plain_model: Callable, pack: Callable
) -> None:
    import copy

    tokens, offsets = pack([5, 17, 1, 60, 3, 17, 300])
    plain = plain_model(architecture)
    ours = copy.deepcopy(packed_model(architecture)).to("cuda", dtype)
    expected = plain_logits(plain, tokens, offsets)
    found = packed_logits(ours, tokens.cuda(), offsets)
    assert relative_error(found, expected) < tolerance
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)) / len(tokens)
    (expected * upstream).sum().backward()
    (found.float() * upstream.cuda()).sum().backward()
    for name, gradient in gradients(plain).items():
        # Routing is discrete: near a tie half precision takes another expert.
        if architecture != "qwen3_moe" or dtype == torch.float32:
            assert relative_error(ours.get_parameter(name).grad, gradient) < tolerance, name


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("heads", "value_width"), [((4, 4), 64), ((8, 2), 64), ((4, 4), 48)])
def test_flash_attention_equals_float64(heads: tuple[int, int], value_width: int, pack: Callable) -> None:
    _, offsets = pack([5, 170, 1, 64, 129])
    packed = PackedSequences.from_offsets(offsets, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    widths = zip((heads[0], heads[1], heads[1]), (64, 64, value_width), strict=True)
    shapes = [(1, count, packed.num_tokens, width) for count, width in widths]
    states = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes]
    ours = [tensor.clone().requires_grad_() for tensor in states]
    exact = [tensor.double().requires_grad_() for tensor in states]
    output, _ = packed_attention(torch.nn.Identity(), *ours, None, packed=packed)
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(tensor[:, :, start:end] for tensor in exact), is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            for start, end in itertools.pairwise(offsets)
        ],
        dim=1,
    )
    assert relative_error(output, expected) < 0.01
    output.float().square().sum().backward()
    expected.square().sum().backward()
    for found, reference in zip(ours, exact, strict=True):
        assert relative_error(found.grad, reference.grad) < 0.02


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference by norm of the expected."""
    difference = found.detach().double().cpu() - expected.detach().double().cpu()
    return float(difference.norm() / expected.detach().double().cpu().norm())


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
    expected = torch.cat([plain(tokens[None, start:end].long()).logits[0] for start, end in itertools.pairwise(offsets)])
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


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=4
    )
)
def test_owners_share_no_beginnings(groups: list[list[list[int]]]) -> None:
    """Each owner has rows of its own, one after another, as if it were alone."""
    lengths, owners = [len(one) for group in groups for one in group], np.repeat(np.arange(len(groups)), [*map(len, groups)])
    tokens = np.concatenate([np.array(one, np.int32) for group in groups for one in group])
    packed = PackedSequences.from_offsets(np.cumsum([0, *lengths]).astype(np.int64), "cpu", owners)
    assert packed.rows_of_owners == [sum(map(len, group)) for group in groups]
    first, rows = (torch.from_numpy(found) for found in common_beginnings(tokens, packed.offsets, packed.owners))
    beginnings = [len({tuple(one[: end + 1]) for one in group for end in range(len(one))}) for group in groups]
    assert SharedSequences.of(packed, first, rows).rows_of_owners == beginnings
    owner_of_row = np.repeat(np.arange(len(groups)), beginnings)
    np.testing.assert_array_equal(owner_of_row[rows.numpy()], np.repeat(owners, lengths))


def computed_tokens(monkeypatch: pytest.MonkeyPatch, model: Any, tokens: torch.Tensor, offsets: np.ndarray) -> list[int]:
    """How many tokens the model's forward pass was given."""
    counts = []

    def spy(model: Any, tokens: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        counts.append(len(tokens))
        return packed_forward(model, tokens, packed) if tokens.device.type == "cpu" else tokens

    monkeypatch.setattr(logprobs, "packed_forward", spy)
    shared_forward(model, tokens, PackedSequences.from_offsets(offsets, tokens.device))
    return counts


def test_a_prompt_is_computed_once(packed_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, offsets = samples([[20] * 8, [20] * 8])
    assert len(tokens) == 2 * 8 * (PROMPT + 20)
    (count,) = computed_tokens(monkeypatch, packed_model("qwen3"), tokens, offsets)
    random_repeats = 16
    assert 2 * (PROMPT + 8 * 20) - random_repeats < count <= 2 * (PROMPT + 8 * 20)


def test_sequences_with_little_in_common_stay_as_they_are(packed_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, offsets = samples([[20]] * 4)
    assert computed_tokens(monkeypatch, packed_model("qwen3"), tokens, offsets) == [len(tokens)]


def test_other_devices_compute_every_token(packed_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, offsets = samples([[20] * 8])
    assert computed_tokens(monkeypatch, None, tokens.to("meta"), offsets) == [len(tokens)]
