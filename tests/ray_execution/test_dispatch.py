"""What is cut for the ranks and what comes back from them: nothing lost, nothing counted twice, everything in its place."""

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.run.train_step.minibatches import group_offsets
from rlcore.spi import (
    ROUTED_EXPERTS,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    RaggedTokens,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    TokenBatch,
)
from rlcore.spi.arrays import offsets_of
from rlcore.spi.execution import Responses
from rlcore.testing.fakes import FakeTokenizer
from rlcore_ray.dispatch import Dispatch, join_responses, request_for

MAX_TOKENS = 40


def batch_of(lengths: list[int]) -> TokenBatch:
    """Every token is its own number; each but a sequence's first takes part in the loss."""
    offsets = offsets_of(lengths)
    mask = np.ones(offsets[-1], np.bool_)
    mask[offsets[:-1]] = False
    return TokenBatch(
        tokens=np.arange(offsets[-1], dtype=np.int32),
        offsets=offsets,
        loss_mask=mask,
        token_columns={"double": 2 * np.arange(offsets[-1], dtype=np.float32)},
        sequence_columns={"number": np.arange(len(lengths))},
        sampling_mask=SamplingMask.of([np.arange(token, token + token % 3, dtype=np.int32) for token in range(offsets[-1])]),
    )


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    num_ranks=st.integers(1, 9),
    data=st.data(),
)
def test_every_sequence_goes_to_one_rank_with_its_columns(lengths: list[int], num_ranks: int, data: st.DataObject) -> None:
    batch = batch_of(lengths)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    dispatch = Dispatch.of(batch, np.asarray(chosen, np.int64), num_ranks, MAX_TOKENS)
    parts = dispatch.parts(batch)
    assert len(parts) == num_ranks
    assert len({len(part.microbatches()) for part in parts}) == 1
    counted = []
    for microbatch in (microbatch for part in parts for microbatch in part.microbatches()):
        assert microbatch.num_tokens <= MAX_TOKENS or microbatch.num_sequences == 1
        kept = microbatch.counts().num_loss_tokens > 0 or microbatch.token_columns["double"].any()
        assert microbatch.sampling_mask is not None
        np.testing.assert_array_equal(microbatch.sampling_mask.lengths, microbatch.tokens % 3)
        microbatch.sampling_mask.check(microbatch.tokens)
        for place, number in enumerate(microbatch.sequence_columns["number"].tolist()):
            tokens = slice(microbatch.offsets[place], microbatch.offsets[place + 1])
            np.testing.assert_array_equal(
                microbatch.tokens[tokens], np.arange(batch.offsets[number], batch.offsets[number + 1])
            )
            if kept:
                np.testing.assert_array_equal(microbatch.token_columns["double"][tokens], 2.0 * microbatch.tokens[tokens])
                counted.append(number)
    # A filler of the batch's first token alone has no other value than 0 either way.
    assert sorted({*counted, 0} if 0 in chosen else counted) == chosen
    found = sum(microbatch.counts().num_loss_tokens for part in parts for microbatch in part.microbatches())
    assert found == batch.select(np.asarray(chosen, np.int64)).counts().num_loss_tokens


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), num_ranks=st.integers(1, 9), data=st.data())
def test_what_ranks_return_comes_back_in_order(lengths: list[int], num_ranks: int, data: st.DataObject) -> None:
    batch = batch_of(lengths)
    chosen = np.asarray(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))), np.int64)
    dispatch = Dispatch.of(batch, chosen, num_ranks, MAX_TOKENS)
    returned = [np.concatenate([one.tokens for one in part.microbatches()]) for part in dispatch.parts(batch)]
    joined = dispatch.join(batch, [tokens.astype(np.float32) for tokens in returned])
    asked_for = np.repeat(np.isin(np.arange(len(lengths)), chosen), lengths)
    np.testing.assert_array_equal(joined, np.where(asked_for, batch.tokens, 0).astype(np.float32))


@pytest.mark.parametrize(("num_prompts", "num_workers"), [(1, 1), (7, 3), (3, 5), (16, 4)])
def test_samples_come_back_in_the_order_of_the_request(num_prompts: int, num_workers: int) -> None:
    random = np.random.default_rng(num_prompts)
    request = GenerateRequest(
        prompts=RaggedTokens.from_lists([[1 + prompt] * int(random.integers(1, 9)) for prompt in range(num_prompts)]),
        num_samples=3,
        seeds=np.arange(3 * num_prompts, dtype=np.int64),
        max_tokens=random.integers(1, 30, 3 * num_prompts, dtype=np.int32),
        sampling=SamplingParams(),
        weight_version=4,
        routed_experts=num_prompts % 2 == 1,
        sampling_mask=num_prompts % 2 == 1,
    )
    dealt = [prompts for prompts in np.array_split(random.permutation(num_prompts), num_workers) if len(prompts)]
    found = join_responses(dealt, 3, [respond(request_for(request, prompts)) for prompts in dealt])
    expected = respond(request)
    assert found.texts == expected.texts
    for name in ("tokens", "offsets", "logprobs", "weight_versions", "finish_reasons"):
        np.testing.assert_array_equal(getattr(found.result, name), getattr(expected.result, name), err_msg=name)
    routed = expected.result.routed_experts
    assert (found.result.routed_experts is None) == (routed is None) == (num_prompts % 2 == 0)
    if routed is not None:
        np.testing.assert_array_equal(found.result.routed_experts.experts, routed.experts)
        np.testing.assert_array_equal(found.result.routed_experts.offsets, routed.offsets)
    mask = expected.result.sampling_mask
    assert (found.result.sampling_mask is None) == (mask is None) == (num_prompts % 2 == 0)
    if mask is not None:
        np.testing.assert_array_equal(found.result.sampling_mask.tokens, mask.tokens)
        np.testing.assert_array_equal(found.result.sampling_mask.offsets, mask.offsets)


def test_fillers_are_routed_as_what_they_copy() -> None:
    batch = batch_of([3, 5])
    routed = batch.with_token_column(ROUTED_EXPERTS, np.arange(1, 33, dtype=np.int16).reshape(8, 2, 2))
    parts = Dispatch.of(routed, np.arange(2), 3, MAX_TOKENS).parts(routed)
    found = [part.microbatches()[0] for part in parts]
    filler = next(microbatch for microbatch in found if not microbatch.loss_mask.any())
    np.testing.assert_array_equal(filler.token_columns[ROUTED_EXPERTS], routed.token_columns[ROUTED_EXPERTS][:3])


def respond(request: GenerateRequest) -> Any:
    """Samples that depend on their prompt, seed and limit."""
    prompts = np.repeat([request.prompts.sequence(index)[0] for index in range(request.prompts.num_sequences)], 3)
    lengths = request.max_tokens.astype(np.int64)
    result = GenerateResult(
        tokens=np.repeat((prompts + request.seeds) % 26 + 1, lengths).astype(np.int32),
        offsets=offsets_of(lengths),
        logprobs=-np.repeat(request.seeds, lengths).astype(np.float32),
        weight_versions=np.repeat(request.seeds % 5, lengths).astype(np.int32),
        finish_reasons=np.where(request.seeds % 2, FinishReason.STOP, FinishReason.LENGTH).astype(np.uint8),
        routed_experts=_routed(request, lengths) if request.routed_experts else None,
        sampling_mask=_mask(request, lengths) if request.sampling_mask else None,
    )
    return Responses.of(result, FakeTokenizer())


def _mask(request: GenerateRequest, lengths: Any) -> SamplingMask:
    kept = np.repeat(request.seeds % 4, lengths)
    owners = np.repeat(np.repeat(request.seeds, lengths), kept)
    return SamplingMask(tokens=owners.astype(np.int32), offsets=offsets_of(kept))


def _routed(request: GenerateRequest, lengths: Any) -> RoutedExperts:
    whole = np.repeat(request.prompts.lengths, request.num_samples) + lengths
    rows = np.repeat(request.seeds, whole)[:, None, None] + np.arange(4).reshape(2, 2)
    return RoutedExperts(experts=rows.astype(np.int16), offsets=offsets_of(whole))


@settings(deadline=None, max_examples=50)
@given(num_pairs=st.integers(1, 12), num_ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_an_empty_microbatch_is_filled_with_a_whole_group_that_counts_in_no_loss(
    num_pairs: int, num_ranks: int, seed: int
) -> None:
    batch = batch_of(np.random.default_rng(seed).integers(2, 30, 2 * num_pairs).tolist())
    every = np.arange(2 * num_pairs)
    dispatch = Dispatch.of(batch, every, num_ranks, MAX_TOKENS, groups=group_offsets(every // 2))
    counted = []
    for microbatch in (microbatch for part in dispatch.parts(batch) for microbatch in part.microbatches()):
        chosen, rejected = microbatch.sequence_columns["number"].reshape(-1, 2).T
        assert (chosen % 2 == 0).all()
        assert (rejected == chosen + 1).all()
        lengths = microbatch.loss_lengths
        assert lengths.all() or not (lengths.any() or microbatch.token_columns["double"].any())
        counted += microbatch.sequence_columns["number"][lengths > 0].tolist()
    assert sorted(counted) == every.tolist()


def test_images_go_with_their_sequences_and_prompts():
    images = tuple((bytes([number]),) * (number % 3) for number in range(7))
    batch = evolve(batch_of([3, 9, 4, 4, 1, 20, 5]), images=images)
    dispatch = Dispatch.of(batch, np.array([6, 1, 2, 5, 4]), num_ranks=2, max_tokens=12)
    parts = [microbatch for part in dispatch.parts(batch) for microbatch in part.microbatches()]
    found = [own for microbatch in parts for own in microbatch.images]
    assert found == [images[number] for number in dispatch.sequences.tolist()]
    assert all(len(microbatch.images) == microbatch.num_sequences for microbatch in parts)
    request = GenerateRequest(
        prompts=RaggedTokens.from_lists([[number] for number in range(7)]),
        num_samples=2,
        seeds=np.arange(14),
        max_tokens=np.ones(14, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
        images=images,
    )
    assert request_for(request, np.array([5, 1])).images == (images[5], images[1])
