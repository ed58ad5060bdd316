"""What requests become on their way to the engines, and back."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import (
    ContractError,
    FinishReason,
    GenerateRequest,
    GeneratorContext,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    SamplingParams,
)
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.dealing import deal
from rlcore_vllm.environment import omp_threads_bind
from rlcore_vllm.sampling import (
    FinishedSample,
    check_sampling,
    engine_sampling,
    engine_seeds,
    finish_reason,
    join_samples,
    sample_limits,
)
from rlcore_vllm.settings import capture_sizes, engine_settings, engines_per_device, replica_devices


def request_of(lengths, num_samples, max_tokens=8):
    num = len(lengths) * num_samples
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[index] * length for index, length in enumerate(lengths)]),
        num_samples=num_samples,
        seeds=np.arange(num) + 100,
        max_tokens=np.full(num, max_tokens, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )


@given(lengths=st.lists(st.integers(1, 20), max_size=12), num_samples=st.integers(1, 9), num_engines=st.integers(1, 5))
def test_every_sample_is_dealt_to_one_engine_with_its_own_prompt_seed_and_limit(lengths, num_samples, num_engines):
    request = request_of(lengths, num_samples)
    limits = np.arange(1, len(request.seeds) + 1, dtype=np.int32)
    parts = deal(request, limits, num_engines)
    assert len(parts) == num_engines
    numbers = np.concatenate([part.numbers for part in parts])
    assert sorted(numbers.tolist()) == list(range(len(request.seeds)))
    for part in parts:
        assert part.seeds.tolist() == request.seeds[part.numbers].tolist()
        assert part.limits.tolist() == limits[part.numbers].tolist()
        for number, prompt in zip(part.numbers.tolist(), part.prompt_of.tolist(), strict=True):
            assert part.prompts.sequence(prompt).tolist() == request.prompts.sequence(number // num_samples).tolist()
        assert (np.diff(part.prompt_of) >= 0).all(), "samples of one prompt are not adjacent"


def test_samples_of_a_prompt_stay_together_where_there_are_enough_prompts():
    parts = deal(request_of([3] * 16, 8), np.full(128, 8, np.int32), 2)
    assert [part.prompts.num_sequences for part in parts] == [8, 8]


@pytest.mark.parametrize("num_prompts", [1, 3, 32])
def test_engines_get_equal_work(num_prompts):
    random = np.random.default_rng(0)
    request = request_of(random.integers(1, 60, num_prompts).tolist(), 8)
    limits = random.integers(1, 200, len(request.seeds), dtype=np.int32)
    work = [int(part.limits.sum()) for part in deal(request, limits, 2)]
    assert max(work) < 1.35 * min(work)


def test_seeds_differ_in_all_their_bits():
    """Seeds that only differ above bit 31, or by one, become quite different ones; all lie within 32 bits."""
    seeds = np.array([0, 1, 2**32, 2**33, 2**62, 2**63 - 1], np.int64)
    mixed = engine_seeds(seeds)
    assert len(set(mixed)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in mixed)
    assert len(set(engine_seeds(np.arange(10_000, dtype=np.int64)))) > 9_990


@pytest.mark.parametrize(
    ("reason", "num_tokens", "expected"),
    [
        ("stop", 3, FinishReason.STOP),
        ("stop", 8, FinishReason.STOP),
        ("length", 8, FinishReason.LENGTH),
        ("length", 7, FinishReason.ABORTED),
        ("abort", 8, FinishReason.ABORTED),
        ("error", 0, FinishReason.ABORTED),
        ("repetition", 5, FinishReason.ABORTED),
        ("a reason of a later version", 5, FinishReason.ABORTED),
    ],
)
def test_only_a_stop_is_a_finished_answer(reason, num_tokens, expected):
    assert finish_reason(reason, num_tokens, 8) is expected


def test_samples_come_back_in_their_order():
    samples = [
        FinishedSample(
            number=number,
            tokens=np.full(length, number, np.int32),
            logprobs=np.full(length, -number, np.float32),
            weight_versions=np.full(length, 4, np.int32),
            finish_reason=FinishReason.LENGTH if length else FinishReason.ABORTED,
        )
        for number, length in ((2, 1), (0, 3), (1, 0))
    ]
    result = join_samples(samples)
    assert result.tokens.tolist() == [0, 0, 0, 2]
    assert result.logprobs.tolist() == [0.0, 0.0, 0.0, -2.0]
    assert result.offsets.tolist() == [0, 3, 3, 4]
    assert result.finish_reasons.tolist() == [FinishReason.LENGTH, FinishReason.ABORTED, FinishReason.LENGTH]
    assert len(join_samples([]).offsets) == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 1e-7}, "temperature = 1e-07"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0, "stop_strings": ("",)}, r"top_p = 0.0, stop_strings = \('',\)"),
    ],
)
def test_sampling_that_names_no_distribution_is_refused(options, found):
    with pytest.raises(ContractError, match=f"found {found}; expected a temperature"):
        check_sampling(SamplingParams(**options))


def test_limits_are_those_of_the_sample_and_of_the_sequence():
    assert sample_limits(request_of([3, 9], 2), 12, 50).tolist() == [8, 8, 3, 3]
    with pytest.raises(ContractError, match="12 tokens in prompt 1; expected fewer than max_sequence_length = 12"):
        sample_limits(request_of([3, 12], 1), 12, 50)
    with pytest.raises(ContractError, match="token ids from 0 to 2; expected ids from 0 to 1"):
        sample_limits(request_of([1, 1, 1], 1), 12, 2)


def test_low_temperatures_are_taken_as_they_are():
    """vLLM itself would raise them to 0.01."""
    params = engine_sampling(SamplingParams(temperature=0.002), 3, 5, logprobs=True)
    assert (params.temperature, params.seed, params.max_tokens, params.ignore_eos, params.logprobs) == (0.002, 3, 5, True, 0)
    assert engine_sampling(SamplingParams(), 3, 5, logprobs=False).logprobs is None


def arguments_of(device, length=100, **options):
    context = GeneratorContext(model=ModelSpec(path="x"), rank_info=RankInfo(device=device), seed=0, max_sequence_length=length)
    return engine_settings(context, VllmConfig(**options)).arguments


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8192),
        ({"max_num_batched_tokens": 3000}, 3000),
        ({"max_num_batched_tokens": 3000, "max_num_seqs": 4096}, 4096),
        ({"max_num_seqs": 10_000}, 10_000),
    ],
)
def test_a_step_takes_as_many_tokens_as_the_section_says_and_one_of_each_sequence(device, options, expected):
    """vLLM's scheduler refuses fewer tokens than sequences, and without this would take 2,048 of them."""
    from vllm.config import SchedulerConfig

    arguments = arguments_of(device, **options)
    assert arguments["max_num_batched_tokens"] == expected
    lengths = {name: arguments[name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
    SchedulerConfig(**lengths, is_encoder_decoder=False)  # which raises where it refuses them


def test_on_a_cpu_a_step_takes_a_whole_prompt():
    assert arguments_of("cpu", 9000)["max_num_batched_tokens"] == 9000
    assert arguments_of("cuda", 9000)["max_num_batched_tokens"] == 8192


def test_the_head_computes_in_float32_unless_the_section_says_otherwise():
    own = {"hf_overrides": {"rope_theta": 5.0}}
    assert arguments_of("cuda")["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments_of("cuda", engine=own)["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 5.0}
    assert arguments_of("cpu", engine={"hf_overrides": {"head_dtype": "model"}})["hf_overrides"] == {"head_dtype": "model"}


def test_graphs_are_captured_up_to_the_largest_batch():
    for largest in (1, 5, 8, 100, 1000, 1024):
        sizes = capture_sizes(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        assert all(later <= max(size + 8, 1.25 * size) for size, later in pairwise(sizes) if size >= 8)
    assert len(capture_sizes(1024)) < 32


def test_engines_take_the_devices_in_turn():
    assert replica_devices(VllmConfig(), 3) == [(3,)]
    assert replica_devices(VllmConfig(replicas=3, devices=(4, 5)), 0) == [(4,), (5,), (4,)]
    assert replica_devices(VllmConfig(replicas=2, tensor_parallel=2, devices=(0, 1, 2, 3)), 0) == [(0, 1), (2, 3)]
    assert engines_per_device(VllmConfig(replicas=3, devices=(4, 5))) == 2
    assert engines_per_device(VllmConfig(replicas=2)) == 2


def test_ranks_share_the_cores_out(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 5, 8, 9})
    assert omp_threads_bind(2) == "2,3|5,8"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {7})
    assert omp_threads_bind(2) == "7|7"
