"""Log-probabilities recorded beside a model runner: through preemption, chunked prefill and slots that change hands."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_vllm import versions
from rlcore_vllm.memory import recorder_bytes
from rlcore_vllm.recorder import Sampled, logprobs_of, most_bytes, record

VOCABULARY = 11
SLOTS = 3
POSITIONS = 40


TABLE_BYTES = (SLOTS + 1) * POSITIONS * 4


class Runner:
    """The parts of vLLM's model runner V2 that the recorder touches."""

    def __init__(self) -> None:
        self.max_num_reqs, self.max_model_len, self.device = SLOTS, POSITIONS, torch.device("cpu")
        self.req_states = SimpleNamespace(req_id_to_index={}, prefill_len=SimpleNamespace(np=np.zeros(SLOTS, np.int64)))
        self.sampler = SimpleNamespace(sample=self.sample)

    def sample(self, logits, expanded_idx_mapping, pos, return_logprobs=False):
        generator = torch.Generator().manual_seed(int(pos.sum()) + 1)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0], logits

    def _remove_request(self, request: str) -> bool:
        return self.req_states.req_id_to_index.pop(request, None) is not None

    def add(self, request: str, prefill_length: int) -> None:
        slot = next(slot for slot in range(SLOTS) if slot not in self.req_states.req_id_to_index.values())
        self.req_states.req_id_to_index[request] = slot
        self.req_states.prefill_len.np[slot] = prefill_length

    def step(self, requests: dict[str, int], random: torch.Generator) -> dict[str, float]:
        """Sample one token for each request, given the position of the token before; returns the log-probabilities."""
        logits = torch.randn(len(requests), VOCABULARY, generator=random)
        slots = torch.tensor([self.req_states.req_id_to_index[request] for request in requests])
        sampled, _ = self.sampler.sample(logits, expanded_idx_mapping=slots, pos=torch.tensor(list(requests.values())))
        expected = logits.double().log_softmax(-1)[torch.arange(len(requests)), sampled]
        return dict(zip(requests, expected.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_every_token_keeps_its_own_logprob(work, choices):
    """Requests of (prompt length, tokens) come, are preempted and end in any order, more of them than there are slots."""
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder = record(runner)
    waiting = {f"r{index}": (prompt, count, []) for index, (prompt, count) in enumerate(work)}
    running: dict[str, tuple[int, int, list[float]]] = {}
    ended = {}
    while waiting or running:
        while waiting and len(running) < SLOTS:
            request = choices.choice(sorted(waiting))
            prompt, count, found = running[request] = waiting.pop(request)
            recorder.expect(request, prompt + count)
            runner.add(request, prompt + len(found))
            if choices.random() < 0.5 and prompt + len(found) > 1:  # a part of the prefill samples a token that nobody wants
                runner.step({request: choices.randrange(prompt + len(found) - 1)}, random)
        taking_part = [request for request in running if choices.random() < 0.8]
        if taking_part:
            positions = {request: running[request][0] + len(running[request][2]) - 1 for request in taking_part}
            for request, logprob in runner.step(positions, random).items():
                running[request][2].append(logprob)
        for request in list(running):
            prompt, count, found = running[request]
            if len(found) == count:
                ended[request] = running.pop(request)
                if choices.random() < 0.7 or len(ended) > 1:
                    runner._remove_request(request)
            elif choices.random() < 0.2:
                waiting[request] = running.pop(request)
                runner._remove_request(request)
        for request in list(runner.req_states.req_id_to_index):
            if request not in running:
                runner._remove_request(request)
    asked = [Sampled(request=request, prompt_length=prompt, num_tokens=count) for request, (prompt, count, _) in ended.items()]
    for one, found in zip(asked, recorder.fetch(asked), strict=True):
        np.testing.assert_allclose(found, ended[one.request][2], atol=1e-5)
        assert found.dtype == np.float32
    assert recorder.fetch([]) == []
    for request in ended:
        runner._remove_request(request)
    assert recorder.device_bytes == TABLE_BYTES, "rows that were fetched are kept"


def test_a_request_that_still_has_its_slot_is_read_there():
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder = record(runner)
    recorder.expect("a", 4)
    runner.add("a", 2)
    expected = [runner.step({"a": 1}, random)["a"], runner.step({"a": 2}, random)["a"]]
    found = recorder.fetch([Sampled(request="a", prompt_length=2, num_tokens=2)])
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="request b"):
        recorder.fetch([Sampled(request="b", prompt_length=2, num_tokens=2)])


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
        runner._remove_request(request)
    assert recorder.device_bytes == TABLE_BYTES + 5 * 4
    recorder.forget(["cut after"])
    assert recorder.device_bytes == TABLE_BYTES
    with pytest.raises(RuntimeError, match="request cut after"):
        recorder.fetch([Sampled(request="cut after", prompt_length=2, num_tokens=1)])


def test_a_thousand_samples_leave_nothing_behind():
    """Each is fetched while it still has its slot, as most are, and gives it up afterwards."""
    runner, random = Runner(), torch.Generator().manual_seed(0)
    recorder = record(runner)
    for index in range(1000):
        request = f"r{index}"
        recorder.expect(request, 3)
        runner.add(request, 2)
        expected = runner.step({request: 1}, random)[request]
        (found,) = recorder.fetch([Sampled(request=request, prompt_length=2, num_tokens=1)])
        np.testing.assert_allclose(found, [expected], atol=1e-5)
        runner._remove_request(request)
    assert recorder.device_bytes == TABLE_BYTES


def test_a_sample_that_was_cut_before_its_first_token_has_no_logprobs():
    recorder = record(Runner())
    recorder.expect("a", 5)
    (found,) = recorder.fetch([Sampled(request="a", prompt_length=2, num_tokens=0)])
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
    np.testing.assert_allclose(recorder.fetch([Sampled(request="a", prompt_length=2, num_tokens=1)])[0], [expected], atol=1e-5)


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
            runner._remove_request(request)
    assert TABLE_BYTES < recorder.device_bytes <= recorder_bytes(SLOTS, POSITIONS)
    assert recorder.most_ended == 1


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
