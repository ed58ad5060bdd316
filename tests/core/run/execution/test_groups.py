"""Trainer and generator of one process as the loop sees them: whole batches in, whole results out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.registry.binding import build_generator, build_trainer
from rlcore.registry.discovery import Registry
from rlcore.run.execution.groups import InProcessGenerator, InProcessTrainer
from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    ExportWeightsRequest,
    GeneratorContext,
    Head,
    LoadStateRequest,
    LogprobsRequest,
    LossSpec,
    ModelSpec,
    RankInfo,
    RefitRequest,
    SamplingParams,
    SaveStateRequest,
    SetResidencyRequest,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
    capabilities,
    hookimpl,
)
from rlcore.spi.arrays import offsets_of
from rlcore.spi.execution import LogprobsColumn, Minibatch
from rlcore.testing.fakes import FakeTokenizer, fake_registry
from rlcore.testing.fakes.algorithm import FakePolicyGradientConfig
from rlcore.testing.fakes.generator import FakeGeneratorConfig
from rlcore.testing.fakes.policy import VALUES_PATH
from rlcore.testing.fakes.providers import FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig
from rlcore_rollout.episode import Completion, CompletionRequest
from rlcore_rollout.request_queue import RequestQueue

MODEL = ModelSpec(path="none")
LOSS = LossSpec(
    path="rlcore.testing.fakes.algorithm:fake_policy_gradient", config=FakePolicyGradientConfig(), token_columns=(ADVANTAGES,)
)
sent: list[TrainStepRequest | LogprobsRequest] = []


class Recording(FakeTrainer):
    """Keeps what it is sent."""

    @hookimpl
    def train_step(self, request):
        sent.append(request)
        return super().train_step(request)

    @hookimpl
    def get_logprobs(self, request):
        sent.append(request)
        return super().get_logprobs(request)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "recording", sys.modules[Recording.__module__])
    sent.clear()


def trainer(max_tokens: int = 8, less: frozenset[str] = frozenset(), head: Head = "tokens") -> InProcessTrainer:
    provider = evolve(FAKE_TRAINER, backend="recording:Recording", capabilities=FAKE_TRAINER.capabilities - less)
    (entry,) = Registry.from_providers({"trainer": [provider]}).of("trainer")
    context = TrainerContext(
        model=MODEL if head == "tokens" else ModelSpec(path=VALUES_PATH),
        rank_info=RankInfo(),
        seed=3,
        num_train_steps=4,
        needs_reference=head == "tokens",
        max_sequence_length=16,
        head=head,
    )
    handle = build_trainer(entry, context, FakeTrainerConfig(initial_scale=0.5))
    return InProcessTrainer(handle=handle, max_tokens_per_microbatch=max_tokens, temperature=0.5)


def batch_of(lengths: list[int]) -> TokenBatch:
    """Tokens from 1 on, everything but the first of each sequence in the loss."""
    offsets = offsets_of(lengths)
    number = int(offsets[-1])
    mask = np.ones(number, np.bool_)
    mask[offsets[:-1]] = False
    columns = {
        ADVANTAGES: np.linspace(-1, 1, number, dtype=np.float32) * mask,
        GENERATION_LOGPROBS: np.zeros(number, np.float32),
    }
    return TokenBatch(
        tokens=np.arange(1, number + 1, dtype=np.int32) % 31,
        offsets=offsets,
        loss_mask=mask,
        token_columns=columns,
        sequence_columns={"group_ids": np.zeros(len(lengths), np.int32)},
    )


def minibatch(batch: TokenBatch, chosen: list[int]) -> Minibatch:
    return Minibatch.of(batch, np.asarray(chosen, np.int64), batch.loss_lengths, 2)


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(2, 6), min_size=1, max_size=8), max_tokens=st.integers(6, 30), data=st.data())
def test_logprobs_are_in_the_places_of_their_tokens_however_they_were_cut(
    lengths: list[int], max_tokens: int, data: st.DataObject
) -> None:
    batch = batch_of(lengths)
    chosen = np.asarray(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))), np.int64)
    found = trainer(max_tokens).logprobs(batch, chosen, "policy", 0)
    whole = trainer(1000).logprobs(batch, np.arange(len(lengths)), "policy", 0)
    inside = np.repeat(np.isin(np.arange(len(lengths)), chosen), lengths)
    np.testing.assert_array_equal(found, np.where(inside, whole, 0.0))
    assert found.dtype == np.float32


def test_values_are_in_the_places_of_their_tokens_and_need_no_column() -> None:
    batch, chosen = batch_of([3, 5, 2, 6]), np.asarray([0, 2, 3])
    found = trainer(6, head="value").values(batch, chosen, 0)
    whole = trainer(1000, head="value").values(batch, np.arange(4), 0)
    assert np.abs(whole).min() > 0
    np.testing.assert_array_equal(found, np.where(np.repeat([True, False, True, True], [3, 5, 2, 6]), whole, 0.0))


def test_columns_of_log_probabilities_are_of_the_updates_that_read_them() -> None:
    batch, group = batch_of([3, 4, 5, 6]), trainer(6)  # which cuts the longest sequence first
    minibatches = [minibatch(batch, [0, 2]), minibatch(batch, [3])]  # nothing is learned from sequence 1
    columns = [LogprobsColumn(name="a", model="policy"), LogprobsColumn(name="b", model="reference", first=1)]
    found = group.with_logprobs(minibatches, columns, (ADVANTAGES,), 0)
    assert [one.sequences.tolist() for one in found] == [[0, 2], [3]]
    expected = {"a": group.logprobs(batch, np.array([0, 2, 3]), "policy", 0)}
    for version, (one, names) in enumerate(zip(found, (("a",), ("a", "b")), strict=True)):
        expected["b"] = trainer(8).logprobs(batch, np.array([3]), "reference", 0)
        group.train_step(one, evolve(LOSS, token_columns=(ADVANTAGES, *names)), version, bounds={}, logprobs=False)
        for part in sent[-1].microbatches:
            assert part.token_columns.keys() == {ADVANTAGES, *names}
            for name in names:
                places = part.tokens - 1  # what batch_of makes of them
                np.testing.assert_array_equal(part.token_columns[name], expected[name][places])


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(2, 6), min_size=2, max_size=8), max_tokens=st.integers(6, 30))
def test_a_step_does_not_depend_on_its_microbatches(lengths: list[int], max_tokens: int) -> None:
    batch = batch_of(lengths)
    results = []
    for tokens in (max_tokens, 1000):
        group = trainer(tokens)
        options = {"bounds": {}, "logprobs": True, "gradient_norms": True}
        result, logprobs = group.train_step(minibatch(batch, list(range(len(lengths)))), LOSS, 0, **options)
        np.testing.assert_array_equal(logprobs, trainer(1000).logprobs(batch, np.arange(len(lengths)), "policy", 0))
        results.append((result.loss, result.grad_norm, *(norm for _, norm in sorted(result.gradient_norms.items()))))
        assert sum(norm**2 for norm in result.gradient_norms.values()) == pytest.approx(result.grad_norm**2)
        assert result.weight_version == 1
    assert results[0] == pytest.approx(results[1], rel=1e-6, abs=1e-9)


def test_a_trainer_is_sent_no_column_that_its_loss_does_not_read() -> None:
    batch, group = batch_of([3, 4, 5]), trainer(5)
    _, logprobs = group.train_step(minibatch(batch, [0, 2]), LOSS, 0, bounds={"kl": 9.0}, logprobs=False)
    group.logprobs(batch, np.asarray([1]), "reference", 1)
    assert logprobs is None
    step, evaluation = sent
    assert [set(microbatch.token_columns) for microbatch in step.microbatches] == [{ADVANTAGES}] * 2
    assert step.counts.num_loss_sequences == 2
    assert (step.bounds, step.temperature, step.schedule_step) == ({"kl": 9.0}, 0.5, 2)
    (bare,) = evaluation.microbatches
    assert not bare.token_columns
    assert not bare.sequence_columns
    assert (evaluation.model, evaluation.temperature, evaluation.weight_version) == ("reference", 0.5, 1)


def test_a_trainer_that_keeps_no_place_in_the_schedule_is_told_its_version() -> None:
    group = trainer(less=frozenset({capabilities.SCHEDULE_STEP}))
    group.train_step(minibatch(batch_of([3]), [0]), LOSS, 0, bounds={}, logprobs=False)
    assert sent[0].schedule_step == 0


def test_a_group_of_one_is_its_backend(tmp_path: Path) -> None:
    group = trainer()
    assert group.has(capabilities.RESIDENCY)
    assert not group.has(capabilities.MULTI_RANK)
    assert group.is_usable
    group.train_step(minibatch(batch_of([3]), [0]), LOSS, 0, bounds={}, logprobs=False)
    assert group.save_state(SaveStateRequest(directory=tmp_path, kind="resume")).files
    other = trainer()
    assert other.load_state(LoadStateRequest(directory=tmp_path)).weight_version == 1
    resident, asleep = (SetResidencyRequest(weights=place, state=place) for place in ("device", "host"))
    assert group.set_residency(asleep).device_bytes <= group.set_residency(resident).device_bytes
    group.handle.close()
    assert not group.is_usable


def test_a_generators_responses_come_with_their_texts() -> None:
    entry = fake_registry().of("generator")[0]
    context = GeneratorContext(model=MODEL, rank_info=RankInfo(), seed=0, max_sequence_length=16)
    handle = build_generator(entry, context, FakeGeneratorConfig())
    export = trainer().handle.export_weights(ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=2**20))
    handle.refit(RefitRequest(weight_version=0, channel="in_process", weights=export, may_alias=False))
    found: list[Completion] = []

    def keep(handed: Sequence[Completion]) -> None:
        found.extend(handed)
        if len(found) == 4:
            feed.end()

    feed = RequestQueue(keep)
    feed.begin(0)
    prompts = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    sampling = SamplingParams()
    feed.ask(
        [
            CompletionRequest(prompt=prompts[seed % 2], seed=seed, max_tokens=5, sampling=sampling, owner=seed)
            for seed in range(4)
        ]
    )
    InProcessGenerator(handle=handle, decoder=FakeTokenizer()).stream(feed, 0)
    assert [one.text for one in found] == [FakeTokenizer().decode(one.tokens) for one in found]
    assert all(len(one.tokens) for one in found)
