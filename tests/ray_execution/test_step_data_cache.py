"""What ranks keep of a step: each update's sequences once, with the log-probabilities that the driver would have put there."""

from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.registry.binding import build_trainer
from rlcore.registry.discovery import Registry
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.spi import (
    ADVANTAGES,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    ROUTED_EXPERTS,
    LogprobsRequest,
    LossSpec,
    ModelSpec,
    RankInfo,
    TokenBatch,
    TrainerContext,
    hookimpl,
)
from rlcore.spi.arrays import Int64Array, offsets_of
from rlcore.testing.fakes.algorithm import FakePolicyGradientConfig
from rlcore.testing.fakes.providers import FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig
from rlcore_ray.dispatch import Dispatch
from rlcore_ray.step_data_cache import CachedColumn, StepDataCache

MAX_TOKENS = 24
UNUSED = "unused"
seen: list[LogprobsRequest] = []


class Noting(FakeTrainer):
    """Notes what its log-probabilities are computed of."""

    @hookimpl
    def get_logprobs(self, request):
        seen.append(request)
        return super().get_logprobs(request)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "noting", sys.modules[Noting.__module__])


def handle() -> TrainerHandle:
    provider = evolve(FAKE_TRAINER, backend="noting:Noting")
    (entry,) = Registry.from_providers({"trainer": [provider]}).of("trainer")
    context = TrainerContext(
        model=ModelSpec(path="none"),
        rank_info=RankInfo(),
        seed=3,
        num_train_steps=4,
        needs_reference=True,
        max_sequence_length=64,
        head="tokens",
    )
    return build_trainer(entry, context, FakeTrainerConfig(initial_scale=0.5))


def batch_of(lengths: list[int]) -> TokenBatch:
    offsets = offsets_of(lengths)
    number = int(offsets[-1])
    mask = np.ones(number, np.bool_)
    mask[offsets[:-1]] = False
    return TokenBatch(
        tokens=(np.arange(1, number + 1) % 31).astype(np.int32),
        offsets=offsets,
        loss_mask=mask,
        token_columns={ADVANTAGES: np.arange(number, dtype=np.float32), UNUSED: np.ones(number, np.float32)},
        sequence_columns={"number": np.arange(len(lengths))},
    )


def loss(*columns: str) -> LossSpec:
    return LossSpec(
        path="rlcore.testing.fakes.algorithm:fake_policy_gradient", config=FakePolicyGradientConfig(), token_columns=columns
    )


def cut(batch: TokenBatch, updates: list[Int64Array], num_ranks: int) -> tuple[list[Dispatch], Dispatch, Int64Array]:
    dispatches = [Dispatch.of(batch, update, num_ranks, MAX_TOKENS) for update in updates]
    return dispatches, Dispatch.joined(dispatches), offsets_of([one.num_microbatches for one in dispatches])


def column(name: str, model: str, passes: Int64Array) -> CachedColumn:
    request = LogprobsRequest(microbatches=(), model=model, temperature=0.5, entropy=False, weight_version=0)  # type: ignore[arg-type]
    return CachedColumn(name=name, request=request, passes=passes)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(2, 12), min_size=3, max_size=30), num_ranks=st.integers(1, 4))
def test_an_update_gets_what_it_would_from_the_driver(lengths: list[int], num_ranks: int) -> None:
    batch = batch_of(lengths)
    updates = [np.asarray(part) for part in np.array_split(np.arange(len(lengths)), 3)]
    dispatches, whole, bounds = cut(batch, updates, num_ranks)
    one = handle()
    values = {}
    for model in ("policy", "reference"):
        request = column("", model, bounds).request
        values[model] = one.get_logprobs(evolve(request, microbatches=(batch,))).logprobs[0]
    given_by_driver = batch.with_token_column(REFERENCE_LOGPROBS, values["reference"])
    given_by_driver = given_by_driver.with_token_column(PREVIOUS_LOGPROBS, values["policy"])
    columns = [
        column(REFERENCE_LOGPROBS, "reference", whole.passes(batch.lengths, MAX_TOKENS, 0)),
        column(PREVIOUS_LOGPROBS, "policy", whole.passes(batch.lengths, MAX_TOKENS, int(bounds[1]))),
    ]
    reads = (ADVANTAGES, REFERENCE_LOGPROBS, PREVIOUS_LOGPROBS)
    for rank, part in enumerate(whole.parts(batch)):
        held = StepDataCache(part, bounds)
        for each in columns:
            held.compute(one, each)
        for number, dispatch in enumerate(dispatches):
            names = reads[: 3 if number else 2]
            found = held.take(number, loss(*names))
            expected = dispatch.parts(given_by_driver)[rank].microbatches()
            assert held.is_last(number) == (number == 2)
            assert len(found) == len(expected)
            for mine, theirs in zip(found, expected, strict=True):
                assert set(mine.token_columns) == set(names)
                np.testing.assert_array_equal(mine.tokens, theirs.tokens)
                np.testing.assert_array_equal(mine.loss_mask, theirs.loss_mask)
                np.testing.assert_array_equal(mine.sequence_columns["number"], theirs.sequence_columns["number"])
                for name in names:
                    own, its = (np.where(mine.loss_mask, batch_.token_columns[name], 0) for batch_ in (mine, theirs))
                    np.testing.assert_array_equal(own, its, err_msg=name)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=4, max_size=40), num_ranks=st.integers(1, 5), skipped=st.integers(0, 2))
def test_a_pass_joins_what_fits_on_every_rank(lengths: list[int], num_ranks: int, skipped: int) -> None:
    batch = batch_of(lengths)
    _, whole, bounds = cut(batch, [np.asarray(part) for part in np.array_split(np.arange(len(lengths)), 4)], num_ranks)
    passes = whole.passes(batch.lengths, MAX_TOKENS, int(bounds[skipped]))
    assert (passes[0], passes[-1]) == (bounds[skipped], whole.num_microbatches)
    tokens = np.array([[one.num_tokens for one in part.microbatches()] for part in whole.parts(batch)])
    together = [tokens[:, start:end].sum(axis=1).max() for start, end in pairwise(passes)]
    sizes = np.diff(passes)
    assert sizes.min() > 0
    assert all(largest <= MAX_TOKENS or size == 1 for largest, size in zip(together, sizes, strict=True))
    for place in range(len(sizes) - 1):
        assert tokens[:, passes[place] : passes[place + 1] + 1].sum(axis=1).max() > MAX_TOKENS, "another one had room"


def test_log_probabilities_of_the_reference_are_computed_of_bare_tokens() -> None:
    batch = batch_of([3, 4, 5, 6])
    routed = batch.with_token_column(ROUTED_EXPERTS, np.zeros((18, 1, 1), np.int16))
    _, whole, bounds = cut(routed, [np.array([0, 1]), np.array([2, 3])], 1)
    seen.clear()
    held = StepDataCache(whole.parts(routed)[0], bounds)
    held.compute(handle(), column(REFERENCE_LOGPROBS, "reference", whole.passes(routed.lengths, MAX_TOKENS, 0)))
    (asked,) = seen
    (microbatch,) = asked.microbatches
    assert microbatch.num_sequences == 4, "the updates' microbatches fit into one"
    assert not microbatch.token_columns
    assert not microbatch.sequence_columns
    (first,) = held.take(0, loss(ADVANTAGES))
    assert set(first.token_columns) == {ADVANTAGES, ROUTED_EXPERTS}
