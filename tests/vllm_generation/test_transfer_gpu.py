"""CUDA IPC and NCCL, first between two bare processes, then to real engines, in bfloat16 and FP8."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))

from vllm_float8 import assert_holds
from vllm_refit_faults import FAULT_VARIABLE
from vllm_refit_receiver import serve
from vllm_refit_support import CONFIG, checkpoint, context_of, errors, export_of, policy, refit, reusing, sample, with_buckets

from rlcore.spi import ReceiverRank, RefitError, WorkerError
from rlcore_torchkit.channels import cuda_ipc
from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.channels import make_sender
from rlcore_vllm.channels.manifest import Manifest
from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.replicas.process import ProcessReplica
from rlcore_vllm.replicas.replica import LocalReplica
from rlcore_vllm.setup.settings import engine_settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

DEVICE = torch.device("cuda", 0)
GPU_CONFIG = evolve(
    CONFIG,
    gpu_memory_utilization=0.1,
    enforce_eager=True,
    refit_timeout_s=60.0,
    engine={"worker_extension_cls": "vllm_refit_faults.FaultyWorkerExtension"},
)
MODELS = {"dense": ("qwen2", True), "experts": ("qwen3_moe", False)}
OWN_ERROR, OTHER_ERROR = 0.1, 0.5
"""Mean error of log-probabilities in bfloat16: of the engine's own weights at most, of other weights at least."""
FLOAT8_ERROR = 0.25
"""As OWN_ERROR, where weights, activations and the KV cache are rounded to 3 bits of mantissa: emulated it is 0.08."""
BUCKET_BYTES = 300_000


@pytest.fixture
def other_process():
    """A function (channel, device index) -> ask(method, *arguments), which raises what the receiver raised."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:

        def start(channel, device_index):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, channel, device_index), daemon=True)
            process.start()
            stack.callback(process.kill)

            def ask(method, *arguments):
                ours.send((method, arguments))
                return answer()

            def answer():
                assert ours.poll(60), "the receiver does not answer"
                found = ours.recv()
                if isinstance(found, Exception):
                    raise found
                return found

            ask.send = lambda method, *arguments: ours.send((method, arguments))
            ask.answer = answer
            ask.process = process
            return ask

        yield start


def tensors_of(seed, count=6):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1000 + index, 33, generator=generator).to(DEVICE, torch.bfloat16) for index in range(count)]


def manifest_of(tensors, persistent):
    export = export_of({f"t{index}": tensor for index, tensor in enumerate(tensors)}, 1, persistent=persistent)
    return Manifest.of(export)


def place_of(device_index):
    uuid = str(torch.cuda.get_device_properties(device_index).uuid)
    return ReceiverRank(replica=0, rank=0, pid=0, host=os.uname().nodename, device="cuda", uuid=uuid)


@pytest.mark.parametrize("device_index", [0, pytest.param(1, marks=two_devices)])
@pytest.mark.parametrize("persistent", [True, False])
def test_ipc_to_another_process(persistent, device_index, other_process):
    """What a receiver on another device returns are copies, which outlive the bucket."""
    ask = other_process("cuda_ipc", device_index)
    sender = make_sender("cuda_ipc", CONFIG, DEVICE)
    ask("connect", *sender.connect([place_of(0)]))
    tensors = tensors_of(0)
    base = torch.randn(4000, device=DEVICE)
    tensors += [base[1000:2000].view(10, 100), base[3000:]]
    for _ in range(3):
        manifest = manifest_of(tensors, persistent)
        sender.begin(manifest.specs, persistent=manifest.persistent)
        ask("begin", persistent)
        for tensor in tensors:
            tensor += 1
        for index, part in enumerate((slice(0, 3), slice(3, 8), slice(0, 8))):
            digests, stable = ask("receive", sender.put(index, tensors[part]), list(manifest.specs[part]))
            assert digests == tensor_digests(tensors[part])
            assert stable is (persistent or device_index == 1)
            sender.acknowledged(index)
        ask("end")
        sender.end()
    sender.close()


def test_ipc_copies_nothing_of_a_persistent_export_and_lets_its_memory_go(other_process):
    ask = other_process("cuda_ipc", 0)
    sender = make_sender("cuda_ipc", CONFIG, DEVICE)
    ask("connect", *sender.connect([place_of(0)]))
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    tensors = [torch.ones(64 * 2**20, dtype=torch.bfloat16, device=DEVICE)]
    manifest = manifest_of(tensors, True)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    sender.begin(manifest.specs, persistent=manifest.persistent)
    ask("begin", True)
    where = sender.put(0, tensors)
    assert torch.cuda.max_memory_allocated() - held < 2**20
    ask("receive", where, list(manifest.specs))
    ask("end")
    sender.end()
    tensors[0].untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + 2**21


def test_ipc_refuses_expandable_segments():
    code = """
        import torch
        from rlcore.spi import ChannelOptions
        from rlcore_torchkit.channels.cuda_ipc import Sender
        kept = torch.ones(1, device="cuda")
        try:
            Sender(ChannelOptions(), kept.device).connect([])
        except Exception as error:
            print(type(error).__name__, error)
    """
    options = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=os.environ | options, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("RefitError refit: channel cuda_ipc cannot share memory of expandable segments")


def test_ipc_needs_a_device_that_both_see():
    with pytest.raises(RefitError, match="does not see GPU-elsewhere"):
        cuda_ipc.index_of("GPU-elsewhere")


@two_devices
def test_nccl_to_another_process(other_process):
    ask = other_process("nccl", 1)
    sender = make_sender("nccl", evolve(CONFIG, refit_timeout_s=30.0), DEVICE)
    (options,) = sender.connect([place_of(1)])
    ask.send("connect", options)
    sender.join()
    ask.answer()
    for refit_number in range(2):
        tensors = tensors_of(refit_number, 12)
        manifest = manifest_of(tensors, False)
        sender.begin(manifest.specs, persistent=manifest.persistent)
        ask("begin", False)
        under_way = None
        for index in range(6):
            part = slice(2 * index, 2 * index + 2)
            where = sender.put(index, tensors[part])
            if under_way is not None:
                assert ask.answer()[0] == tensor_digests(tensors[under_way])
                sender.acknowledged(index - 1)
            ask.send("receive", where, list(manifest.specs[part]))
            under_way = part
        assert ask.answer()[0] == tensor_digests(tensors[under_way])
        sender.acknowledged(5)
        ask("end")
        sender.end()
    sender.close()


@two_devices
@pytest.mark.timeout(120)
def test_nccl_gives_a_dead_receiver_up(other_process):
    """Without a limit of its own it would wait until the test's."""
    ask = other_process("nccl", 1)
    sender = make_sender("nccl", evolve(CONFIG, refit_timeout_s=60.0), DEVICE)
    ask.send("connect", *sender.connect([place_of(1)]))
    sender.join()
    ask.answer()
    ask.process.kill()
    sender.group["timeout_s"] = 3.0  # too short for connecting
    # Little would fit into NCCL's own buffers, and be sent without a receiver.
    large = [torch.zeros(2**27, dtype=torch.bfloat16, device=DEVICE)]
    sender.begin(manifest_of(large, False).specs, persistent=False)
    sender.put(0, large)
    with pytest.raises(Exception, match="(?i)nccl"):
        sender.acknowledged(0)
    sender.close()
    assert bool(torch.ones(3, device=DEVICE).sum() == 3)


class Refitted:
    """An engine on one GPU, and the weights that it is given."""

    def __init__(self, directory, folder, config=GPU_CONFIG, devices=(0,), in_process=False):
        self.directory = directory
        self.config = config
        self.settings = engine_settings(self.context("in_process" if in_process else "cuda_ipc"), config)
        if in_process:
            self.replica = LocalReplica("vllm-0", self.settings, devices)
        else:
            self.replica = ProcessReplica("vllm-0", self.settings, devices, config, folder)
        self.replica.start()

    def context(self, channel):
        return context_of(self.directory, channel, device="cuda", dtype="bfloat16")

    def weights(self, version):
        return checkpoint(policy(self.directory, version), DEVICE, torch.bfloat16)

    def refit(self, channel, export, config=None):
        transfer = Transfer(
            channel=channel, replicas=[self.replica], context=self.context(channel), config=config or self.config
        )
        with contextlib.closing(transfer):
            return refit([self.replica], transfer, export)

    def call(self, method, **arguments):
        return self.replica.call_workers(method, arguments).result()

    def assert_holds(self, version, *others, own_error=OWN_ERROR):
        samples = sample(self.replica, version)

        def mean_error(which):
            return errors(policy(self.directory, which).to(DEVICE, torch.bfloat16), samples).mean()

        assert mean_error(version) < own_error
        for other in others:
            assert mean_error(other) > OTHER_ERROR


@contextlib.contextmanager
def refitted(tmp_path_factory, name, **options):
    architecture, tied = MODELS[name]
    folder = tmp_path_factory.mktemp(f"refit-{name}")
    size = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "initializer_range": 0.05}
    directory = make_model(folder / "model", architecture, tied=tied, dtype="bfloat16", **size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT_VARIABLE, str(folder / "fault.json"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        engine = Refitted(directory, folder, **options)
        engine.fault_file = folder / "fault.json"
        with contextlib.closing(engine.replica):
            yield engine


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory):
    with refitted(tmp_path_factory, request.param) as made:
        yield made


@pytest.mark.parametrize(("channel", "persistent"), [("cuda_ipc", True), ("cuda_ipc", False), ("directory", True)])
def test_each_of_several_refits_counts(channel, persistent, engine):
    for version in range(3):
        tensors = engine.weights(version)
        export = export_of(tensors, version, persistent=persistent, bucket_bytes=BUCKET_BYTES)
        if not persistent:
            export = with_buckets(export, reusing(export.buckets))
        digests = engine.refit(channel, export)
        assert digests == dict(zip(tensors, tensor_digests(tensors.values()), strict=True))
        engine.assert_holds(version, *range(version))


def test_straight_into_the_parameters_equals_the_layerwise_reload(engine):
    held = []
    for layerwise in (False, True):
        engine.refit("cuda_ipc", export_of(engine.weights(40), 40))
        assert engine.call("refit_test_is_direct") == [True]
        engine.call("refit_test_load_layerwise", layerwise=layerwise)
        engine.refit("cuda_ipc", export_of(engine.weights(41), 41))
        held.append(engine.call("refit_test_parameter_digests"))
        engine.assert_holds(41, 40)
        engine.call("refit_test_load_layerwise", layerwise=False)
    assert held[0] == held[1]


def test_what_changes_on_the_way_is_caught(engine, monkeypatch):
    put = cuda_ipc.Sender.put

    def spoil(sender, index, tensors):
        where = put(sender, index, tensors)
        if index == 1:
            sender.buffers[1][0] ^= 1
            torch.cuda.synchronize()
        return where

    export = export_of(engine.weights(50), 50, bucket_bytes=BUCKET_BYTES)
    buckets = list(export.buckets)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_ipc.Sender, "put", spoil)
        with pytest.raises(RefitError, match=f"digests: {buckets[1].tensors[0].name}"):
            engine.refit("cuda_ipc", with_buckets(export, buckets))
    engine.refit("cuda_ipc", export_of(engine.weights(51), 51))
    engine.assert_holds(51, 50)


def test_another_engine_starts_in_the_same_process(engine):
    process = engine.replica._child.process
    engine.refit("cuda_ipc", export_of(engine.weights(60), 60))
    engine.replica.restart()
    assert engine.replica._child.process is process
    engine.refit("cuda_ipc", export_of(engine.weights(61), 61))
    engine.assert_holds(61, 60)


def test_another_engine_starts_in_the_trainers_process(tmp_path_factory):
    plain = evolve(GPU_CONFIG, engine={})  # vLLM's worker takes one extension class in a process
    with refitted(tmp_path_factory, "dense", config=plain, in_process=True) as engine:
        engine.refit("in_process", export_of(engine.weights(0), 0))
        engine.assert_holds(0)
        engine.replica.restart()
        engine.refit("in_process", export_of(engine.weights(1), 1))
        engine.assert_holds(1, 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {"quantization": "fp8"}),
        ("dense", {"quantization": "fp8_per_block", "kv_cache_dtype": "fp8"}),
        # Captured graphs read the scales that they were captured with, unless a refit writes to the same memory.
        ("experts", {"quantization": "fp8", "enforce_eager": False}),
        ("experts", {"quantization": "fp8_per_block", "enforce_eager": False, "kv_cache_dtype": "fp8"}),
    ],
)
def test_float8(name, options, tmp_path_factory):
    """Two refits leave what each would alone, also after the weights have been discarded; rounded as float8 rounds."""
    per_block = options["quantization"] == "fp8_per_block"
    with refitted(tmp_path_factory, name, config=evolve(GPU_CONFIG, **options)) as engine:
        for version in range(3):
            tensors = engine.weights(version)
            if version == 2:
                for weights in (False, True):
                    engine.replica.set_residency(weights=weights, cache=weights, discard_weights=True).result()
            engine.refit("cuda_ipc", export_of(tensors, version, bucket_bytes=BUCKET_BYTES))
            assert engine.call("refit_test_is_direct") == [False]
            (held,) = engine.call("refit_test_held_weights")
            assert assert_holds(tensors, held, per_block=per_block)[0] == 8
            engine.assert_holds(version, *range(version), own_error=FLOAT8_ERROR)


@two_devices
def test_ipc_to_an_engine_of_two_devices(tmp_path_factory):
    """Its second rank maps the trainer's memory on another device than its own."""
    config = evolve(GPU_CONFIG, tensor_parallel=2, devices=(0, 1))
    with refitted(tmp_path_factory, "dense", config=config, devices=(0, 1)) as engine:
        for version, persistent in enumerate((True, False, True)):
            export = export_of(engine.weights(version), version, persistent=persistent, bucket_bytes=BUCKET_BYTES)
            engine.refit("cuda_ipc", export if persistent else with_buckets(export, reusing(export.buckets)))
            engine.assert_holds(version, *range(version))


@pytest.fixture(scope="module")
def engine_on_another_device(tmp_path_factory):
    with refitted(tmp_path_factory, "dense", config=evolve(GPU_CONFIG, devices=(1,)), devices=(1,)) as made:
        yield made


@two_devices
def test_nccl_to_an_engine(engine_on_another_device):
    engine = engine_on_another_device
    for version in range(3):
        tensors = engine.weights(version)
        export = export_of(tensors, version, bucket_bytes=BUCKET_BYTES)
        digests = engine.refit("nccl", with_buckets(export, reusing(export.buckets)))
        assert digests == dict(zip(tensors, tensor_digests(tensors.values()), strict=True))
        engine.assert_holds(version, *range(version))


@two_devices
@pytest.mark.timeout(400)
def test_nccl_and_an_engine_that_hangs(engine_on_another_device):
    """It hangs for longer than the test may take. The last test of this engine."""
    engine = engine_on_another_device
    engine.fault_file.write_text(json.dumps({"rank": 0, "wait_for": "/never"}))
    with pytest.raises(WorkerError, match="vllm-0"):
        engine.replica.begin_update().result()
        config = evolve(engine.config, refit_timeout_s=5.0)
        transfer = Transfer(channel="nccl", replicas=[engine.replica], context=engine.context("nccl"), config=config)
        with contextlib.closing(transfer):
            transfer.send(export_of(engine.weights(9), 9))


@two_devices
def test_ipc_needs_the_trainers_device(engine_on_another_device):
    engine = engine_on_another_device
    engine.replica.restart()
    with pytest.raises(RefitError, match="channel cuda_ipc needs the trainer's GPU"):
        engine.refit("cuda_ipc", export_of(engine.weights(10), 10))
