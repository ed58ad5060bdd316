"""Log-probabilities recorded beside a model runner: through preemption, chunked prefill and slots that change hands."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from vllm_recorded import POSITIONS, SLOTS, TABLE_BYTES, VOCABULARY, Runner, assert_every_token_keeps_its_own

from rlcore_vllm.engines import versions
from rlcore_vllm.engines.recorder import RecordedRequest, logprobs_of, most_bytes, record
from rlcore_vllm.engines.sampling_masks import MaskRecorder
from rlcore_vllm.setup.memory import recorder_bytes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_every_token_keeps_its_own_logprob(work, choices):
    runner = Runner()
    assert_every_token_keeps_its_own(runner, record(runner), lambda: None, work, choices)


def test_a_request_that_still_has_its_slot_is_read_there():
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder = record(runner)
    recorder.expect("a", 4)
    runner.add("a", 2)
    expected = [runner.step({"a": 1}, random)["a"], runner.step({"a": 2}, random)["a"]]
    found = recorder.fetch([RecordedRequest(request="a", prompt_length=2, num_tokens=2)])
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="request b"):
        recorder.fetch([RecordedRequest(request="b", prompt_length=2, num_tokens=2)])


def test_what_nobody_asks_for_is_dropped():
    """Neither what vLLM runs to warm up, nor a sample that is cut, before it leaves its slot or after."""
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder = record(runner)
    for request in ("warm-up", "cut before", "cut after"):
        runner.add(request, 2)
        if request != "warm-up":
            recorder.expect(request, 5)
        runner.step({request: 1}, random)
        if request == "cut before":
            recorder.forget([request])
        runner.remove(request)
    assert recorder.device_bytes == TABLE_BYTES + 5 * 4
    recorder.forget(["cut after"])
    assert recorder.device_bytes == TABLE_BYTES
    with pytest.raises(RuntimeError, match="request cut after"):
        recorder.fetch([RecordedRequest(request="cut after", prompt_length=2, num_tokens=1)])


def test_a_thousand_samples_leave_nothing_behind():
    """Each is fetched while it still has its slot, as most are, and gives it up afterwards."""
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder = record(runner)
    for index in range(1000):
        request = f"r{index}"
        recorder.expect(request, 3)
        runner.add(request, 2)
        expected = runner.step({request: 1}, random)[request]
        (found,) = recorder.fetch([RecordedRequest(request=request, prompt_length=2, num_tokens=1)])
        np.testing.assert_allclose(found, [expected], atol=1e-5)
        runner.remove(request)
    assert recorder.device_bytes == TABLE_BYTES


def test_a_sample_that_was_cut_before_its_first_token_has_no_logprobs():
    recorder = record(Runner())
    recorder.expect("a", 5)
    (found,) = recorder.fetch([RecordedRequest(request="a", prompt_length=2, num_tokens=0)])
    assert found.tolist() == []


def test_the_table_is_given_back_and_taken_again():
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder = record(runner)
    recorder.release()
    assert recorder.device_bytes == 0
    runner.add("warm-up", 2)
    runner.step({"warm-up": 1}, random)
    recorder.reserve()
    recorder.expect("a", 4)
    runner.add("a", 2)
    expected = runner.step({"a": 1}, random)["a"]
    np.testing.assert_allclose(
        recorder.fetch([RecordedRequest(request="a", prompt_length=2, num_tokens=1)])[0], [expected], atol=1e-5
    )


class Worker:
    """As much of vLLM's as measures memory."""

    def __init__(self, runner: object) -> None:
        self.model_runner = runner

    def determine_available_memory(self) -> int:
        return 10_000


def test_the_kv_cache_gets_what_the_recorder_leaves(monkeypatch):
    monkeypatch.setattr(Worker, "determine_available_memory", Worker.determine_available_memory)
    monkeypatch.setattr(Worker, "rlcore_measured", None, raising=False)
    del Worker.rlcore_measured
    versions.leave_room_for_recorder(Worker)
    versions.leave_room_for_recorder(Worker)
    runner = Runner()
    assert most_bytes(runner) == recorder_bytes(SLOTS, POSITIONS) == (2 * SLOTS + 1 + 1) * POSITIONS * 4
    assert Worker(runner).determine_available_memory() == 10_000 - most_bytes(runner)
    assert Worker(object()).determine_available_memory() == 10_000, "another runner, without a recorder"


def test_no_more_is_held_than_was_counted():
    """All slots are preempted, as a refit does, and the last samples end before anything is fetched."""
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder = record(runner)
    requests = [f"r{slot}" for slot in range(SLOTS)]
    for turn in range(2):
        for request in requests:
            recorder.expect(request, POSITIONS)
            runner.add(request, 2 + turn)
        runner.step(dict.fromkeys(requests, 1 + turn), random)
        for request in requests:
            runner.remove(request)
    assert TABLE_BYTES < recorder.device_bytes <= recorder_bytes(SLOTS, POSITIONS)
    assert recorder.most_ended == 1


def test_masks_are_noted_beside_log_probabilities():
    """Each recorder finds the sampler's arguments behind the other."""
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder, masks = record(runner), MaskRecorder(runner)
    recorder.expect("a", 4)
    masks.expect("a")
    runner.add("a", 2)
    asked = [RecordedRequest(request="a", prompt_length=2, num_tokens=1)]
    expected = runner.step({"a": 1}, random)["a"]
    np.testing.assert_allclose(recorder.fetch(asked)[0], [expected], atol=1e-5)
    assert masks.fetch(asked)[0].tokens.tolist() == list(range(VOCABULARY))


@pytest.mark.parametrize("missing", ["sampler", "req_states", "sample", "spec"])
def test_other_runners_are_left_alone(missing):
    runner = Runner()
    if missing == "sample":
        runner.sampler.sample = lambda logits, metadata: None
    elif missing == "spec":
        runner.rejection_sampler = object()
    else:
        delattr(runner, missing)
    assert record(runner) is None


def logits_with_gaps(device: str) -> torch.Tensor:
    """Rows of which whole blocks are -inf, as after truncated sampling."""
    logits = torch.full((5, 20_000), -torch.inf)
    for row, columns in enumerate(
        [slice(0, 3), slice(9_000, 9_010), slice(19_999, 20_000), slice(0, 20_000), slice(4_095, 4_098)]
    ):
        logits[row, columns] = torch.randn(logits[row, columns].shape, generator=torch.Generator().manual_seed(row)) * 5
    return logits.to(device)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_truncated_rows(device, dtype):
    logits = logits_with_gaps(device).to(dtype)
    padded = torch.cat([logits, torch.full_like(logits[:, :7], 99.0)], 1)[:, : logits.shape[1]]  # rows that are not adjacent
    tokens = logits.argmax(-1)
    expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    for given_logits in (logits, padded):
        found = logprobs_of(given_logits, tokens)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
