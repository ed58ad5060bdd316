"""The backend with a real engine in this process: sampling, stopping, streaming, refits in flight, and what is around it."""

import gc
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.spi import (
    ADVANTAGES,
    CloseRequest,
    ContractError,
    ExportWeightsRequest,
    FinishReason,
    GenerateRequest,
    LossSpec,
    RaggedTokens,
    RankInfo,
    SamplingParams,
    SetResidencyRequest,
    StreamRequest,
    TrainerContext,
    TrainStepRequest,
    WorkerError,
    find_channel,
    installed_channels,
)
from rlcore_conformance.generators.feeds import ScriptedFeed
from rlcore_conformance.references.probe import ProbeConfig
from rlcore_conformance.trainers.batches import make_batch
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_vllm.backend import VllmBackend, make_replicas
from rlcore_vllm.replicas.replica import LocalReplica
from rlcore_vllm.replicas.request_dispatch import dispatch
from rlcore_vllm.setup.config import VllmConfig

PROMPTS = ([5, 6, 7], [9] * 20, [30, 31])


@pytest.fixture(scope="module")
def references(two_models):
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in two_models.directories]


@pytest.fixture
def backend(local_backend, two_models):
    """Holds the first weights as version 0."""
    two_models.refit(local_backend, 0, 0)
    return local_backend


def request_of(num_samples=2, max_tokens=12, sampling=None, version=0, seed=0, **options):
    num = len(PROMPTS) * num_samples
    return GenerateRequest(
        prompts=RaggedTokens.from_lists(PROMPTS),
        num_samples=num_samples,
        seeds=np.arange(num) + seed,
        max_tokens=np.full(num, max_tokens, np.int32),
        sampling=sampling or SamplingParams(),
        weight_version=version,
        **options,
    )


def samples_of(result):
    return [tokens.tolist() for tokens in np.split(result.tokens, result.offsets[1:-1])]


def errors_of(result, reference, num_samples, prompts=PROMPTS):
    """float64 [T]: how far each log-probability is from a plain forward pass with one set of weights."""
    errors = []
    for index, response in enumerate(samples_of(result)):
        prompt = prompts[index // num_samples]
        with torch.no_grad():
            logprobs = reference(torch.tensor([[*prompt, *response]])).logits[0].double().log_softmax(-1)
        expected = logprobs[torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1), torch.tensor(response)]
        errors.append(np.abs(expected.numpy() - result.logprobs[result.offsets[index] : result.offsets[index + 1]]))
    return np.concatenate(errors)


def test_the_models_own_sampling_defaults_do_not_count(backend, references):
    """Its directory names a temperature, a truncation, a penalty, words to avoid, and tokens to stop at."""
    result = backend.generate(request_of(40, 12))
    assert (np.diff(result.offsets) == 12).all()
    assert (result.finish_reasons == FinishReason.LENGTH).all()
    assert errors_of(result, references[0], 40).max() < 1e-4
    assert np.isin(result.tokens, np.arange(50, 80)).any()
    assert np.isin(result.tokens, np.arange(50)).any()


@pytest.fixture
def standing_still(backend, monkeypatch):
    """An event that is set as the engine stands still at the first sample that ends, and another one that lets it go on."""
    stands, may_go_on = threading.Event(), threading.Event()
    replica = backend._replicas[0]
    generate = replica.generate

    def deliver_to(deliver, finished):
        deliver(finished)
        stands.set()
        assert may_go_on.wait(300)

    monkeypatch.setattr(
        replica, "generate", lambda samples, deliver, *others: generate(samples, partial(deliver_to, deliver), *others)
    )
    yield stands, may_go_on
    may_go_on.set()


def test_a_refit_in_flight_parts_each_sample_by_its_weights(backend, two_models, references, standing_still, monkeypatch):
    """Every token's log-probability is that of the weights that its version names, and by far not that of the others."""
    stands, may_go_on = standing_still
    limits = np.full(9, 250, np.int32)
    limits[:3] = 100
    replica = backend._replicas[0]
    begin_update = replica.begin_update

    def begin():
        begun = begin_update()
        may_go_on.set()
        return begun

    monkeypatch.setattr(replica, "begin_update", begin)
    request = request_of(3, 250)
    request.max_tokens[:] = limits
    with ThreadPoolExecutor() as pool:
        call = pool.submit(backend.generate, request)
        assert stands.wait(300)
        two_models.refit(backend, 1, 7)
        result = call.result(300)
    spans = np.split(result.weight_versions, result.offsets[1:-1])
    assert all((np.diff(span) >= 0).all() for span in spans)
    assert [set(span.tolist()) for span in spans] == [{0}] * 3 + [{0, 7}] * 6
    assert (np.diff(result.offsets) == limits).all()
    by_weights = [errors_of(result, reference, 3) for reference in references]
    is_new = result.weight_versions == 7
    assert by_weights[0][~is_new].max() < 1e-4
    assert by_weights[1][is_new].max() < 1e-4
    assert np.median(by_weights[1][~is_new]) > 0.1
    assert np.median(by_weights[0][is_new]) > 0.1


def test_several_refits_in_flight(backend, two_models, references, monkeypatch):
    replica, begun = backend._replicas[0], threading.Event()
    generate = replica.generate

    def begin(*arguments):
        begun.set()  # while refits are locked out
        return generate(*arguments)

    monkeypatch.setattr(replica, "generate", begin)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(backend.generate, request_of(3, 280))
        assert begun.wait(300)
        for version in range(1, 6):
            two_models.refit(backend, version % 2, version)
        result = call.result(300)
    by_weights = np.stack([errors_of(result, reference, 3) for reference in references])
    assert by_weights[result.weight_versions % 2, np.arange(len(result.tokens))].max() < 1e-4
    assert (np.diff(result.weight_versions) >= 0)[np.diff(np.repeat(np.arange(9), 280)) == 0].all()


def test_each_sample_is_streamed_once_as_it_ends(backend):
    streamed = {}

    def take(number, result):
        assert number not in streamed
        streamed[number] = result

    request = request_of(4, 40, on_finished=take)
    request.max_tokens[:] = np.arange(12) * 3 + 1
    result = backend.generate(request)
    assert list(streamed) == sorted(streamed), "shorter samples end first"
    assert sorted(streamed) == list(range(12))
    for number, sample in streamed.items():
        start, end = result.offsets[number : number + 2]
        assert sample.tokens.tolist() == result.tokens[start:end].tolist()
        assert sample.logprobs.tolist() == result.logprobs[start:end].tolist()
        assert sample.finish_reasons.tolist() == [result.finish_reasons[number]]


def test_a_callback_that_raises_ends_the_call_and_nothing_else(backend):
    def fail(number, result):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        backend.generate(request_of(4, 200, on_finished=fail))
    assert len(backend.generate(request_of()).tokens) == 6 * 12


def test_calls_at_the_same_time_do_not_disturb_each_other(backend):
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(top_p=0.6),
    ]
    requests = [request_of(4, 30, sampling, seed=index) for index, sampling in enumerate(samplings)]
    alone = [backend.generate(request) for request in requests]
    with ThreadPoolExecutor() as pool:
        together = list(pool.map(backend.generate, requests))
    for one, other in zip(alone, together, strict=True):
        assert samples_of(one) == samples_of(other)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


class Streaming:
    """A stream in a thread of its own, with one request; `begun` once a sample of it has ended."""

    def __init__(self, backend, pool, *requests):
        self.begun = threading.Event()
        self.feed = ScriptedFeed(first=requests, then=self.went_on)
        self.call = pool.submit(backend.stream, StreamRequest(feed=self.feed, weight_version=0))

    def went_on(self):
        self.begun.set()
        return []

    def samples(self):
        return [self.feed.delivered[number] for number in range(self.feed.num_samples)]


@pytest.fixture
def start_stream(backend):
    """start_stream(*requests): a stream of requests, of the first of which a sample ends at once."""
    with ThreadPoolExecutor() as pool:
        streams = []

        def start(*requests):
            streams.append(Streaming(backend, pool, *requests))
            assert streams[-1].begun.wait(300)
            return streams[-1]

        yield start
        for stream in streams:
            stream.feed.end()


def with_short_first(request):
    request.max_tokens[0] = 1
    return request


def test_a_stream_samples_each_request_by_its_own_sampling(backend, start_stream):
    samplings = [SamplingParams(temperature=0.4), SamplingParams(stop_strings=("e", "th")), SamplingParams(top_k=3)]
    requests = [with_short_first(request_of(2, 40, sampling, seed=7 * index)) for index, sampling in enumerate(samplings)]
    stream = start_stream(*requests, request_of(0))
    stream.call.result(300)
    expected = [tokens for request in requests for tokens in samples_of(backend.generate(request))]
    assert [sample.tokens.tolist() for sample in stream.samples()] == expected


def test_a_stream_may_end_while_a_refit_is_under_way(backend, two_models, start_stream):
    """Weights are on their way then, and no token is sampled; what is cut has the tokens of before."""
    long = with_short_first(request_of(2, 250))
    stream = start_stream(long)
    (replica,) = backend._replicas
    replica.begin_update().result(120)
    stream.feed.end()
    stream.call.result(120)
    replica.end_update({0: 0}).result(120)
    samples = stream.samples()
    assert [sample.finish_reason for sample in samples] == [FinishReason.LENGTH] + [FinishReason.ABORTED] * 5
    whole = samples_of(backend.generate(long))
    assert [sample.tokens.tolist() for sample in samples] == [
        tokens[: len(sample.tokens)] for tokens, sample in zip(whole, samples, strict=True)
    ]
    two_models.refit(backend, 0, 0)


def test_a_cut_that_fails_is_an_error_and_no_wait_for_ever(backend, monkeypatch):
    engine, request, delivered = backend._replicas[0].engine, request_of(2, 250), []

    def fail_once(*arguments):
        monkeypatch.undo()
        raise ValueError("the device is on fire")

    engine.begin_update().result(120)  # so that no sample ends before the cut
    monkeypatch.setattr(engine, "_hand_out", fail_once)
    (samples,) = dispatch(request, request.max_tokens.astype(np.int64), [0])
    call = engine.generate(samples, delivered.append)
    engine.cut([call])
    with pytest.raises(WorkerError, match="on fire"):
        call.result(120)
    engine.end_update({0: 0}).result(120)
    assert len(backend.generate(request_of()).tokens)
    assert not delivered


def test_requests_do_not_join_engines_that_were_started_anew(backend, start_stream):
    """Such as after a refit that failed: they hold no weights that count."""
    short = with_short_first(request_of(2, 2))
    stream = start_stream(with_short_first(request_of(2, 250)))
    backend._num_starts[0] += 1
    with stream.feed._changed:
        stream.feed._waiting.append(short)
        stream.feed._changed.notify_all()
    with pytest.raises(WorkerError, match="started anew"):
        stream.call.result(300)
    assert len(backend.generate(request_of()).tokens)


def test_stop_strings_end_with_the_token_that_completes_them(backend, two_models):
    tokenizer = AutoTokenizer.from_pretrained(two_models.directories[0])
    free = backend.generate(request_of(2, 40))
    texts = [tokenizer.decode(sample) for sample in samples_of(free)]
    strings = (texts[0][10:12], texts[3][20:23])
    stopped = backend.generate(request_of(2, 40, SamplingParams(stop_strings=strings)))
    for index, (sample, whole) in enumerate(zip(samples_of(stopped), samples_of(free), strict=True)):
        ends = [end for end in range(1, 41) if any(string in tokenizer.decode(whole[:end]) for string in strings)]
        assert sample == whole[: ends[0] if ends else 40]
        assert stopped.finish_reasons[index] == (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert (stopped.finish_reasons == FinishReason.STOP).sum() >= 2


def test_a_prompt_that_ends_within_a_character_is_no_part_of_the_response(backend, two_models):
    """Its text would come with that of the first whole character after it."""
    tokenizer = AutoTokenizer.from_pretrained(two_models.directories[0])
    prompt = [*tokenizer("ab").input_ids, tokenizer("é").input_ids[0]]
    request = request_of(4, 12, SamplingParams(stop_strings=("ab",)))
    result = backend.generate(evolve(request, prompts=RaggedTokens.from_lists([prompt] * 3)))
    has_stopped = ["ab" in tokenizer.decode(sample) for sample in samples_of(result)]
    assert (result.finish_reasons == FinishReason.STOP).tolist() == has_stopped
    assert has_stopped.count(False) > 6


def test_a_stop_string_completed_at_the_limit_is_a_stop(backend, two_models):
    tokenizer = AutoTokenizer.from_pretrained(two_models.directories[0])
    sample = samples_of(backend.generate(request_of(1, 12)))[0]
    string = tokenizer.decode(sample[10:12])
    result = backend.generate(request_of(1, 12, SamplingParams(stop_strings=(string,))))
    first = next(end for end in range(1, 13) if string in tokenizer.decode(sample[:end]))
    assert samples_of(result)[0] == sample[:first]
    assert result.finish_reasons[0] == FinishReason.STOP


def test_logprobs_at_a_very_low_temperature_are_those_sampled_from(backend, references):
    result = backend.generate(request_of(1, 12, SamplingParams(temperature=0.004)))
    for index, response in enumerate(samples_of(result)):
        prompt = PROMPTS[index]
        with torch.no_grad():
            logits = references[0](torch.tensor([[*prompt, *response]])).logits[0].double() / 0.004
        expected = logits.log_softmax(-1)[torch.arange(len(prompt) - 1, len(prompt) + 11), torch.tensor(response)]
        np.testing.assert_allclose(result.logprobs[12 * index : 12 * index + 12], expected.numpy(), atol=2e-2)


def test_a_cached_prefix_is_not_used_under_other_weights(backend, two_models, references):
    """A prompt of several cache blocks, again and again."""
    prompt = np.random.default_rng(0).integers(0, 100, 280).tolist()
    for version, which in enumerate((0, 0, 1, 0)):
        two_models.refit(backend, which, version)
        for _ in range(2):
            question = request_of(1, 12, version=version)
            request = evolve(question, prompts=RaggedTokens.from_lists([prompt] * 3))
            result = backend.generate(request)
            errors = errors_of(result, references[which], 1, [prompt] * 3)
            assert errors.max() < 1e-4
            assert errors_of(result, references[1 - which], 1, [prompt] * 3).max() > 0.1


def test_no_request_leaves_no_samples(backend):
    empty = GenerateRequest(
        prompts=RaggedTokens.from_lists([]),
        num_samples=3,
        seeds=np.zeros(0, np.int64),
        max_tokens=np.zeros(0, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )
    assert len(backend.generate(empty).offsets) == 1


def test_discarded_weights_do_not_count(backend, two_models):
    held = backend.set_residency(SetResidencyRequest(weights="host", state="host", discard_weights=True)).device_bytes
    weights = sum(tensor.numel() * 4 for tensor in AutoModelForCausalLM.from_pretrained(two_models.directories[0]).parameters())
    assert weights < held < weights + 0.11 * 2**30
    with pytest.raises(ContractError, match="no weights; .* version 0"):
        backend.generate(request_of())
    backend.set_residency(SetResidencyRequest(weights="device", state="device"))
    with pytest.raises(ContractError, match="no weights; .* version 0"):
        backend.generate(request_of())
    two_models.refit(backend, 0, 0)
    backend.generate(request_of())


def test_memory_is_not_taken_away_from_samples_in_the_making(backend, standing_still, monkeypatch):
    stands, may_go_on = standing_still
    replica = backend._replicas[0]
    set_residency = replica.set_residency

    def move(**options):
        moved = set_residency(**options)
        may_go_on.set()
        return moved

    monkeypatch.setattr(replica, "set_residency", move)
    with ThreadPoolExecutor() as pool:
        request = request_of(2, 250)
        request.max_tokens[0] = 1
        call = pool.submit(backend.generate, request)
        assert stands.wait(300)
        with pytest.raises(ContractError, match="samples in the making"):
            backend.set_residency(SetResidencyRequest(weights="host", state="host"))
        assert len(call.result(300).offsets) == 7


def test_the_files_of_own_weights_are_checked_before_an_engine_starts(two_models, monkeypatch):
    asked = []
    monkeypatch.setattr("rlcore_vllm.backend.check_hub_files", asked.append)
    monkeypatch.setattr("rlcore_vllm.backend.make_replicas", lambda *_: pytest.fail("an engine"))
    for channel in (None, "directory"):
        with pytest.raises(pytest.fail.Exception):
            VllmBackend(two_models.context(channel=channel), VllmConfig())
    assert asked == [two_models.context().model]


def test_an_in_process_engine_is_alone(backend, two_models):
    with pytest.raises(ContractError, match="engine in this process"):
        VllmBackend(two_models.context(), VllmConfig(cpu_kv_cache_gib=0.1))
    with pytest.raises(ContractError, match="in_process with replicas = 2 and tensor_parallel = 1"):
        VllmBackend(two_models.context(), VllmConfig(replicas=2))
    backend.generate(request_of())


def test_every_channel_that_reaches_the_trainers_process_has_the_engine_there(two_models, monkeypatch):
    monkeypatch.setitem(installed_channels(), "handover", evolve(find_channel("in_process"), name="handover"))
    (replica,) = make_replicas(two_models.context("handover"), VllmConfig())
    assert isinstance(replica, LocalReplica)
    with pytest.raises(ContractError, match="refit.channel: found handover "):
        make_replicas(two_models.context("handover"), VllmConfig(replicas=2))


def test_an_engine_that_fails_is_started_anew(backend, two_models):
    """What vLLM raised is passed on; nothing is generated before the next refit."""
    expected = backend.generate(request_of())

    def fail():
        raise ValueError("the device is on fire")

    backend._replicas[0].engine._core.step_fn = fail
    with pytest.raises(WorkerError, match="(?s)vLLM failed.*ValueError: .* on fire"):
        backend.generate(request_of())
    with pytest.raises(ContractError, match="no weights; .* version 0"):
        backend.generate(request_of())
    two_models.refit(backend, 0, 1)
    assert samples_of(backend.generate(request_of(version=1))) == samples_of(expected)


def host_state():
    """What vLLM is known to change in a process that it runs in."""
    return {
        "environment": dict(os.environ),
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": str(np.random.get_state()),
        "random": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "excepthook": sys.excepthook,
        "grad": torch.is_grad_enabled(),
        "collects garbage": gc.collect,
        "has frozen objects": gc.get_freeze_count() > 0,
    }


@pytest.mark.usefixtures("free_process")
def test_the_process_around_it_is_left_alone(two_models):
    """Also by a start that fails, which leaves room for another and is told in the recipe's terms."""
    before = host_state()
    replaced = [torch.Event, torch.cuda.Event, torch.Tensor.pin_memory, torch.accelerator.synchronize]
    context = evolve(two_models.context(), max_sequence_length=100_000)
    with pytest.raises(WorkerError, match="vllm-0 did not start: .* 100000 tokens"):
        VllmBackend(context, VllmConfig(cpu_kv_cache_gib=0.1))
    assert host_state() == before
    own = VllmBackend(two_models.context(), VllmConfig(cpu_kv_cache_gib=0.1))
    try:
        assert host_state() == before
        two_models.refit(own, 0, 0)
        own.generate(request_of(2, 20, SamplingParams(top_k=5, top_p=0.9)))
        assert host_state() == before
    finally:
        own.close(CloseRequest())
    assert host_state() == before
    assert [torch.Event, torch.cuda.Event, torch.Tensor.pin_memory, torch.accelerator.synchronize] == replaced
    assert not torch.distributed.is_initialized()
    with pytest.raises(ContractError, match="found no weights"):
        own.generate(request_of())


@pytest.mark.usefixtures("free_process")
def test_a_trainer_beside_it_computes_the_same(two_models):
    """Two updates from one seed, alone and with an engine that starts, generates and closes in between; and the process group
    that was there before it survives."""

    def train(between):
        torch.manual_seed(3)
        trainer = Fsdp2Backend(
            TrainerContext(
                model=two_models.context().model,
                rank_info=RankInfo(),
                seed=0,
                num_train_steps=10,
                needs_reference=False,
                max_sequence_length=64,
            ),
            Fsdp2Config(),
        )
        batch = make_batch(100, seed=1)
        draws = []
        for version in range(2):
            request = TrainStepRequest(
                microbatches=(batch,),
                counts=batch.counts(),
                loss=LossSpec(
                    path="rlcore_conformance.references.torch_losses:probe_loss",
                    config=ProbeConfig(entropy_coefficient=0.0),
                    token_columns=(ADVANTAGES,),
                ),
                temperature=1.0,
                weight_version=version,
            )
            trainer.train_step(request)
            draws.append(torch.rand(4).tolist())
            between()
        export = trainer.export_weights(ExportWeightsRequest(weight_version=2, dtype="float32", max_bucket_bytes=1 << 30))
        digests = {named.name: named.digest for bucket in export.buckets for named in bucket.tensors}
        trainer.close(CloseRequest())
        return digests, draws

    own = []

    def disturb():
        if not own:
            own.append(VllmBackend(two_models.context(), VllmConfig(cpu_kv_cache_gib=0.1)))
            two_models.refit(own[0], 0, 0)
        own[0].generate(request_of(2, 20))

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        alone = train(lambda: None)
        try:
            assert train(disturb) == alone
        finally:
            own[0].close(CloseRequest())
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total.item() == 1.0
    finally:
        torch.distributed.destroy_process_group()
