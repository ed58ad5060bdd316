"""Recorders in another process than the engine: what passes between them is pickled, and vLLM's answers come in its order."""

import pickle
import sys
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from vllm_recorded import POSITIONS, SLOTS, TABLE_BYTES, VOCABULARY, Runner, assert_every_token_keeps_its_own

from rlcore_vllm.engines.recorder import RecordedRequest, record

pytest.importorskip("vllm")

from rlcore_vllm.engines.rank_recorders import RankCalls, RemoteLogprobs, RemoteMasks
from rlcore_vllm.ranks.worker import WorkerExtension

NUM_RANKS, OUTPUT_RANK = 4, 2
"""Two stages of a pipeline, of two ranks each."""


class Worker(WorkerExtension):
    """One rank of an engine; those of the first stage do not sample."""

    device = torch.device("cpu")

    def __init__(self, rank):
        self.rank = rank
        self.model_runner = Runner()
        if rank < OUTPUT_RANK:
            self.model_runner.sampler = None


class Executor:
    """vLLM's of several processes: calls go to all ranks in order, and one answers, or an exception comes out in its place."""

    output_rank = OUTPUT_RANK

    def __init__(self):
        self.workers = [Worker(rank) for rank in range(NUM_RANKS)]
        self.calls = []
        self.unread = deque()

    @property
    def runner(self):
        return self.workers[OUTPUT_RANK].model_runner

    def collective_rpc(self, method, args, non_block, unique_reply_rank):
        message = pickle.dumps((method, args))
        self.calls.append(args[1])
        answers = []
        for worker in self.workers:
            name, arguments = pickle.loads(message)
            answers.append(pickle.dumps(getattr(worker, name)(*arguments)))
        future = Future()
        self.unread.append((future, answers[unique_reply_rank]))
        if non_block:
            return future
        self.read()
        return future.result()

    def read(self):
        """What a step does with the answers to all calls before it."""
        while self.unread:
            future, answer = self.unread.popleft()
            future.set_result(pickle.loads(answer))


@pytest.fixture
def executor():
    return Executor()


@pytest.fixture
def calls(executor):
    return RankCalls(executor)


def one(request, prompt_length, num_tokens):
    return RecordedRequest(request=request, prompt_length=prompt_length, num_tokens=num_tokens)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_every_token_keeps_its_own_logprob(work, choices):
    executor = Executor()
    calls = RankCalls(executor)
    recorder = RemoteLogprobs.start(calls, SLOTS)
    assert_every_token_keeps_its_own(executor.runner, recorder, calls.tell, work, choices)


def test_only_the_rank_that_answers_records(executor, calls):
    samplers = [worker.model_runner.sampler for worker in executor.workers]
    before = [sampler and sampler.sample for sampler in samplers]
    assert RemoteLogprobs.start(calls, SLOTS) is not None
    replaced = [(sampler and sampler.sample) != own for sampler, own in zip(samplers, before, strict=True)]
    assert replaced == [False, False, True, False]


def test_another_runner_is_left_alone(executor, calls):
    del executor.runner.req_states
    assert RemoteLogprobs.start(calls, SLOTS) is None


def test_as_many_may_have_ended_as_beside_one_rank(calls):
    runner = Runner()
    runner.max_num_reqs = 64
    assert RemoteLogprobs.start(calls, 64).most_ended == record(runner).most_ended == 16


def test_what_needs_no_answer_goes_in_one_call_before_a_step(executor, calls):
    recorder, masks = RemoteLogprobs.start(calls, SLOTS), RemoteMasks(calls)
    executor.calls.clear()
    for request in "abc":
        recorder.expect(request, 5)
        masks.expect(request)
    masks.forget(["b"])
    assert executor.calls == []
    calls.tell()
    calls.tell()
    assert [len(orders) for orders in executor.calls] == [7]
    recorder.forget(iter("a"))
    assert recorder.device_bytes == TABLE_BYTES
    assert [len(orders) for orders in executor.calls] == [7, 2], "it goes along with what has an answer"


def test_samples_that_ended_are_fetched_in_one_call(executor, calls):
    recorder, random = RemoteLogprobs.start(calls, SLOTS), torch.Generator().manual_seed(0)
    expected = {}
    for request in "abc":
        recorder.expect(request, 4)
        executor.runner.add(request, 2)
    calls.tell()
    for position in (1, 2):
        for request, logprob in executor.runner.step(dict.fromkeys("abc", position), random).items():
            expected.setdefault(request, []).append(logprob)
    executor.runner.remove("b")
    executor.calls.clear()
    found = recorder.fetch([one("a", 2, 2), one("b", 2, 1), one("c", 2, 0)])
    assert len(executor.calls) == 1
    assert [part.dtype for part in found] == [np.float32] * 3
    np.testing.assert_allclose(np.concatenate(found), [*expected["a"], expected["b"][0]], atol=1e-5)
    assert [len(part) for part in found] == [2, 1, 0]
    assert recorder.fetch([]) == []
    assert len(executor.calls) == 1


def test_what_is_forgotten_is_not_kept(executor, calls):
    recorder, random = RemoteLogprobs.start(calls, SLOTS), torch.Generator().manual_seed(0)
    for request in ("cut before", "cut after"):
        recorder.expect(request, 5)
        calls.tell()
        executor.runner.add(request, 2)
        executor.runner.step({request: 1}, random)
        if request == "cut before":
            recorder.forget([request])
            calls.tell()
        executor.runner.remove(request)
    assert recorder.device_bytes == TABLE_BYTES + 5 * 4
    recorder.forget(["cut after"])
    assert recorder.device_bytes == TABLE_BYTES


def test_the_table_is_given_back_and_taken_again(executor, calls):
    recorder, random = RemoteLogprobs.start(calls, SLOTS), torch.Generator().manual_seed(0)
    recorder.expect("left over", POSITIONS)
    recorder.release()
    assert recorder.device_bytes == 0
    recorder.reserve()
    assert recorder.device_bytes == TABLE_BYTES
    recorder.expect("a", 4)
    calls.tell()
    executor.runner.add("a", 2)
    expected = executor.runner.step({"a": 1}, random)["a"]
    np.testing.assert_allclose(recorder.fetch([one("a", 2, 1)])[0], [expected], atol=1e-5)


def test_masks_are_noted_beside_log_probabilities(executor, calls):
    recorder, masks = RemoteLogprobs.start(calls, SLOTS), RemoteMasks(calls)
    for request in "ab":
        recorder.expect(request, 4)
        masks.expect(request)
        executor.runner.add(request, 2)
    calls.tell()
    executor.runner.step({"a": 1, "b": 1}, torch.Generator().manual_seed(0))
    found = masks.fetch([one("a", 2, 1), one("b", 2, 1)])
    assert [mask.tokens.tolist() for mask in found] == [list(range(VOCABULARY))] * 2
    assert masks.fetch([]) == []


def test_what_a_recorder_raises_comes_out_with_its_cause_and_the_next_call_has_its_own_answer(executor, calls):
    recorder = RemoteLogprobs.start(calls, SLOTS)
    with pytest.raises(RuntimeError, match="recorded for request a"):
        recorder.fetch([one("a", 2, 1)])
    assert recorder.device_bytes == TABLE_BYTES
    assert not executor.unread


def test_what_a_note_raises_comes_out_at_a_later_step_or_answer(executor, calls):
    RemoteLogprobs.start(calls, SLOTS)
    calls.note("masks", "expect", "a")
    calls.tell()
    calls.tell()  # not read yet
    executor.read()
    with pytest.raises(RuntimeError, match="KeyError: 'masks'"):
        calls.tell()
    calls.note("masks", "expect", "a")
    calls.tell()
    with pytest.raises(RuntimeError, match="KeyError: 'masks'"):
        calls.ask("logprobs", "device_bytes")
    assert calls.ask("logprobs", "device_bytes") == TABLE_BYTES
