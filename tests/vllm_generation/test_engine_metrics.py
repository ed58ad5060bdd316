"""vLLM's own metrics of an engine, in the file that the driver reads."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families

from rlcore.spi import CloseRequest, FinishReason, GenerateRequest, RaggedTokens, SamplingParams, TokenReader
from rlcore_vllm.backend import VllmBackend
from rlcore_vllm.checks.engine_arguments import table_problems

PROMPTS = ([5, 6, 7], [9] * 20)
NUM_SAMPLES, NUM_TOKENS = 2, 12
NUM_REQUESTS = NUM_SAMPLES * len(PROMPTS)
EXPECTED = {
    "vllm:num_requests_running": 0,
    "vllm:num_requests_waiting": 0,
    "vllm:prompt_tokens_total": NUM_SAMPLES * sum(map(len, PROMPTS)),
    "vllm:generation_tokens_total": NUM_REQUESTS * NUM_TOKENS,
    "vllm:request_success_total": NUM_REQUESTS,
    "vllm:e2e_request_latency_seconds_count": NUM_REQUESTS,
    "vllm:time_to_first_token_seconds_count": NUM_REQUESTS,
    "vllm:inter_token_latency_seconds_count": NUM_REQUESTS * (NUM_TOKENS - 1),
}
"""Sums over labels after one call of `generate`."""


def sums(file: Path) -> dict[str, float]:
    """The sum of each sample's values over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(file.read_text()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def awaited(file: Path, name: str, value: float) -> dict[str, float]:
    """The sums once the file has the value."""
    deadline = time.monotonic() + 60
    while not file.exists() or (found := sums(file)).get(name) != value:
        assert time.monotonic() < deadline, file.exists() and sums(file).get(name)
        time.sleep(0.1)
    return found


def request(num_tokens: int = NUM_TOKENS) -> GenerateRequest:
    return GenerateRequest(
        prompts=RaggedTokens.from_lists(PROMPTS),
        num_samples=NUM_SAMPLES,
        seeds=np.arange(NUM_REQUESTS),
        max_tokens=np.full(NUM_REQUESTS, num_tokens, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )


@pytest.fixture(scope="module", params=["in_process", "directory"])
def measured(request, two_models, tmp_path_factory) -> Iterator[tuple[VllmBackend, Path]]:
    """An engine in this process, or in one of its own, and the file of its metrics."""
    from .conftest import CONFIG  # type: ignore[import-not-found]

    logs, channel = tmp_path_factory.mktemp("logs"), request.param
    context = two_models.context(channel, log_directory=logs)
    backend = VllmBackend(context, evolve(CONFIG, metrics=True))
    two_models.refit(backend, 0, 0, channel)
    yield backend, logs / "vllm-0.prom"
    backend.close(CloseRequest())
    assert list(logs.glob("*.prom*")) == []


def test_a_generation_is_counted_by_vllms_names(measured) -> None:
    backend, file = measured
    before = sums(file) if file.exists() else {}
    backend.generate(request())
    wanted = before.get("vllm:request_success_total", 0) + NUM_REQUESTS
    found = awaited(file, "vllm:request_success_total", wanted)
    assert {name: found[name] - before.get(name, 0) for name in EXPECTED} == EXPECTED
    assert all(name.startswith("vllm:") for name in found)
    assert {"vllm:kv_cache_usage_perc", "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"} <= found.keys()


def test_requests_that_are_aborted_run_no_more(measured) -> None:
    backend, file = measured
    before = awaited(file, "vllm:num_requests_running", 0)
    nobody_needs_it: Future[None] = Future()

    def cancel(*_: object) -> None:
        if not nobody_needs_it.done():
            nobody_needs_it.set_result(None)

    reader = TokenReader(on_tokens=cancel, cancelled=nobody_needs_it)
    result = backend.generate(evolve(request(270), readers=[reader] * NUM_REQUESTS))
    assert (result.finish_reasons == FinishReason.ABORTED).all()
    tokens = before["vllm:generation_tokens_total"] + len(result.tokens)
    deadline = time.monotonic() + 60
    while (found := sums(file))["vllm:generation_tokens_total"] < tokens or found["vllm:num_requests_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found["vllm:e2e_request_latency_seconds_count"] == before["vllm:e2e_request_latency_seconds_count"]


@pytest.mark.parametrize("value", [True, False])
def test_the_option_alone_keeps_statistics(value: bool) -> None:
    (problem,) = table_problems({"disable_log_stats": value})
    assert problem.path == "generator.vllm.engine.disable_log_stats"
