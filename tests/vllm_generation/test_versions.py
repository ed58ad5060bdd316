"""What differs between versions of vLLM: each branch that can run without a GPU."""

import os
import pickle
import sys
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from rlcore_vllm.engines import versions
from rlcore_vllm.engines.rank_recorders import RemoteLogprobs, RemoteMasks


class Executor:
    """Sleeps as 0.26 does: wholly, and only when nothing sleeps."""

    def __init__(self):
        self.sleeping_tags = set()
        self.calls = []

    def sleep(self, level):
        assert not self.sleeping_tags, "part of the memory would be freed twice"
        self.calls.append(("sleep", level))
        self.sleeping_tags = {"weights", "kv_cache"}

    def wake_up(self, tags):
        assert set(tags) <= self.sleeping_tags
        self.calls.append(("wake_up", tags))
        self.sleeping_tags -= set(tags)


class LaterExecutor(Executor):
    """Can discard a part."""

    def discard(self, tags):
        self.calls.append(("discard", tags))
        self.sleeping_tags |= set(tags)


@pytest.mark.parametrize(("discard", "level"), [(False, 1), (True, 2)])
def test_everything_sleeps_at_once(discard, level):
    executor = Executor()
    versions.put_to_sleep(executor, {"weights", "kv_cache"}, discard)
    assert executor.calls == [("sleep", level)]


def test_what_sleeps_already_is_woken_first():
    executor = Executor()
    executor.sleeping_tags = {"kv_cache"}
    versions.put_to_sleep(executor, {"weights", "kv_cache"}, True)
    assert executor.calls == [("wake_up", ["kv_cache"]), ("sleep", 2)]


def test_the_cache_alone_is_discarded_where_that_is_possible():
    later, earlier = LaterExecutor(), Executor()
    for executor in (later, earlier):
        versions.put_to_sleep(executor, {"kv_cache"}, True)
    assert later.calls == [("discard", ("kv_cache",))]
    assert earlier.calls == [("sleep", 1)], "the weights must not be lost"


class CrowdedExecutor(Executor):
    """Others take memory of the device while it falls asleep, which vLLM finds wrong."""

    def __init__(self, message, world_size):
        super().__init__()
        self.message = message
        self.parallel_config = SimpleNamespace(world_size=world_size)
        self.is_sleeping = False

    def sleep(self, level):
        raise AssertionError(self.message)


GROWN = "Memory usage increased after sleeping."


def test_what_others_take_meanwhile_keeps_no_engine_awake():
    executor = CrowdedExecutor(GROWN, 1)
    versions.put_to_sleep(executor, {"weights", "kv_cache"}, True)
    assert executor.is_sleeping
    assert executor.sleeping_tags == {"weights", "kv_cache"}


@pytest.mark.parametrize(("message", "world_size"), [("another", 1), (GROWN, 2)])
def test_other_failures_to_sleep_are_errors(message, world_size):
    executor = CrowdedExecutor(message, world_size)
    with pytest.raises(AssertionError):
        versions.put_to_sleep(executor, {"weights", "kv_cache"}, True)
    assert not executor.is_sleeping


def test_constants_are_imported_where_they_are_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    versions.import_constants()  # not installed
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text("CONSTANT = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    versions.import_constants()
    assert sys.modules.pop("flashinfer").CONSTANT == 1


def test_requests_name_the_fields_that_every_version_has():
    from vllm.v1.engine import EngineCoreRequest

    request = versions.make_request("7", [1, 2], None)
    assert (request.request_id, request.prompt_token_ids) == ("7", [1, 2])
    required = {field.name for field in msgspec.structs.fields(EngineCoreRequest) if field.required}
    assert len(required) == 9, "a field without a default has come or gone"


def test_caches_are_not_dropped_under_batches_in_flight():
    core = SimpleNamespace(batch_queue=[object()])
    assert versions.num_queued_batches(core) == 1
    with pytest.raises(RuntimeError, match="must be drained"):
        versions.drop_caches(core)
    assert versions.num_queued_batches(SimpleNamespace(batch_queue=None)) == 0


def test_a_prefix_cache_that_stays_is_an_error():
    core = SimpleNamespace(batch_queue=None, reset_prefix_cache=lambda **options: False)
    with pytest.raises(RuntimeError, match="did not drop"):
        versions.drop_caches(core)


def test_the_sampler_draws_nothing_from_the_global_generator(monkeypatch):
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import topk_topp_sampler

    current_platform.import_kernels()
    monkeypatch.setattr(topk_topp_sampler, "torch", torch)
    versions.keep_sampler_off_global_generator(5)
    before = torch.get_rng_state()
    sampler = topk_topp_sampler.TopKTopPSampler("processed_logprobs")
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    own = {0: torch.Generator().manual_seed(1)}
    tokens, logprobs = sampler(logits, own, None, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert tokens.shape == (3,)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1))


def test_ranks_on_a_cpu_sleep_between_looks_for_a_message(monkeypatch):
    shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")
    slept = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)  # to be put back afterwards
    monkeypatch.setattr(versions, "time", SimpleNamespace(sleep=slept.append))  # the module's own name, not the process's clock
    versions.wait_without_spinning()
    # As much of a reader, which has sockets and threads besides, as the wait for a message that comes soon needs.
    reader = SimpleNamespace(is_reader=True, last_read=time.monotonic(), busy_loop_s=3600.0)
    shm_broadcast.SpinCondition.wait(reader)
    assert slept == [1e-4]


def test_messages_are_not_written_over_by_later_ones(monkeypatch):
    shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")
    monkeypatch.setattr(shm_broadcast, "bytearray", lambda view: view, raising=False)  # hand out views, as up to 0.31
    monkeypatch.setattr(shm_broadcast, "pickle", pickle)  # to be put back afterwards
    writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=2**21, max_chunks=2)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)

    def values_after_two_more():
        answers = []
        for value in range(3):
            writer.enqueue({"rows": np.full(2**20, value, np.uint8), "number": value}, timeout=120)
            answers.append(reader.dequeue(timeout=120))
        assert [answer["number"] for answer in answers] == [0, 1, 2]
        return [int(value) for answer in answers for value in np.unique(answer["rows"])]

    assert values_after_two_more() == [2, 1, 2], "the queue is one that writes over what it handed out"
    versions.copy_messages()
    assert values_after_two_more() == [0, 1, 2]


@pytest.mark.parametrize("variable", [("GOMP_CPU_AFFINITY", "4 5"), ("OMP_PLACES", "{4,5}")])
def test_ranks_on_a_cpu_are_forked_and_keep_to_their_cores(variable, monkeypatch):
    executor = pytest.importorskip("vllm.v1.executor.multiproc_executor")
    calls = []
    monkeypatch.setattr(executor, "rlcore_begin", None, raising=False)  # to be as it was afterwards
    monkeypatch.delattr(executor, "rlcore_begin")
    monkeypatch.setattr(executor, "get_mp_context", executor.get_mp_context)
    monkeypatch.setattr(executor.WorkerProc, "worker_main", staticmethod(lambda **arguments: calls.append(arguments)))
    monkeypatch.setattr(versions.os, "sched_setaffinity", lambda _, cores: calls.append(cores))
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(*variable)
    for _ in range(2):
        versions.fork_ranks()
    assert executor.get_mp_context().get_start_method() == "fork"
    executor.WorkerProc.worker_main(rank=1)
    assert calls == [[4, 5], 2, {"rank": 1}]


def test_kernels_are_replaced_once(monkeypatch):
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher")
    calls = []
    monkeypatch.setattr(dispatcher, "rlcore_register", None, raising=False)  # to be as it was afterwards
    monkeypatch.delattr(dispatcher, "rlcore_register")
    monkeypatch.setattr(dispatcher, "register_kernels", lambda kernels: calls.append(set(kernels)))
    monkeypatch.setattr(dispatcher, "_registry", {"one": None})
    for _ in range(2):
        versions.replace_kernels_once()
    for kernels in ({"one": abs}, {"one": abs, "other": abs}):
        dispatcher.register_kernels(kernels)
    assert calls == [{"one", "other"}]


def test_the_sampler_is_not_compiled():
    from vllm.v1.sample import sampler

    versions.keep_sampler_eager()
    versions.keep_sampler_eager()
    assert not hasattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable")
    counts = sampler.batched_count_greater_than(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0]]))
    assert counts.tolist() == [2]


@pytest.mark.parametrize("world_size", [1, 2])
def test_logprobs_are_recorded_on_cuda_alone(world_size):
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"), parallel_config=SimpleNamespace(world_size=world_size)
    )
    llm = SimpleNamespace(vllm_config=config, model_executor=SimpleNamespace(output_rank=0))
    calls = versions.rank_calls(llm)
    assert (calls is None) == (world_size == 1)
    assert versions.logprob_recorder(llm, calls) is None


def test_the_rank_that_records_is_asked_whether_it_can():
    answers = iter([{"answer": True}, {"answer": False}, {"answer": True}])
    asked = []

    def collective_rpc(method, **options):
        asked.append((method, options["unique_reply_rank"]))
        return next(answers)

    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(world_size=2),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    llm = SimpleNamespace(vllm_config=config, model_executor=SimpleNamespace(output_rank=1, collective_rpc=collective_rpc))
    calls = versions.rank_calls(llm)
    recorder = versions.logprob_recorder(llm, calls)
    assert isinstance(recorder, RemoteLogprobs)
    assert recorder.most_ended == 2
    assert versions.logprob_recorder(llm, calls) is None
    assert isinstance(versions.mask_recorder(llm, calls), RemoteMasks)
    assert asked == [("rlcore_record", 1)] * 3


def test_experts_are_reported_with_and_without_a_part_of_their_name():
    parameters = {"layers.0.experts.routed_experts.w13_weight", "layers.0.experts.routed_experts.w2_weight", "norm.weight"}
    assert not versions.without_weights(parameters, parameters)
    shorter = {name.replace("routed_experts.", "") for name in parameters}
    assert not versions.without_weights(parameters, shorter)
    assert versions.without_weights(parameters, shorter - {"layers.0.experts.w2_weight"}) == {
        "layers.0.experts.routed_experts.w2_weight"
    }
    assert versions.without_weights(parameters, parameters - {"norm.weight"}) == {"norm.weight"}


@pytest.mark.parametrize(
    ("capability", "given", "expected"), [(90, None, "0"), (90, "1", "1"), (100, None, None), (89, None, None)]
)
def test_scales_of_blocks_are_exact_where_products_take_any(capability, given, expected, monkeypatch):
    from vllm import envs, platforms
    from vllm.platforms.interface import DeviceCapability, Platform

    class Gpu(Platform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*divmod(capability, 10))

    monkeypatch.setattr(platforms, "_current_platform", Gpu())
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", given or "")
    if given is None:
        monkeypatch.delenv("VLLM_USE_DEEP_GEMM_E8M0")
    versions.keep_scales_exact()
    assert os.environ.get("VLLM_USE_DEEP_GEMM_E8M0") == expected
    assert envs.VLLM_USE_DEEP_GEMM_E8M0 is (expected != "0")
