"""The channels without an engine: what one side puts, the other receives, and nothing is left behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlcore.spi import RefitError, TensorSpec, WorkerError
from rlcore_vllm.channels import cuda_ipc, directory, in_process, make_receiver, make_sender, nccl, shared_memory
from rlcore_vllm.channels.channel import EngineRank
from rlcore_vllm.channels.packing import ALIGNMENT, pack, packed_bytes, unpack
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.manifest import Manifest
from rlcore_vllm.transfer import Receivers

CPU = torch.device("cpu")
CONFIG = VllmConfig(refit_timeout_s=0.2)


def here(replica=0, rank=0, **changes):
    place = EngineRank(replica=replica, rank=rank, pid=os.getpid(), host=os.uname().nodename, device="cpu")
    return evolve(place, **changes)


def tensors_of(seed, count=4):
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    return [torch.randn(3 + index, 5, generator=generator).to(dtypes[index % 3]) for index in range(count)]


def specs_of(tensors):
    return [
        TensorSpec(name=f"t{index}", shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for index, tensor in enumerate(tensors)
    ]


def manifest_of(tensors, persistent=False):
    return Manifest(weight_version=1, specs=tuple(specs_of(tensors)), persistent=persistent)


def assert_same(received, tensors):
    assert all(torch.equal(found, sent) and found.dtype == sent.dtype for found, sent in zip(received, tensors, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8),
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=8, max_size=8),
)
def test_what_is_packed_is_unpacked(shapes, dtypes):
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=False)]
    buffer = torch.full((packed_bytes([tensor.nbytes for tensor in tensors]) + ALIGNMENT,), 255, dtype=torch.uint8)
    pack(tensors, buffer)
    assert_same(unpack(buffer, specs_of(tensors)), tensors)
    assert bool((buffer[-ALIGNMENT:] == 255).all())


@pytest.mark.parametrize("channel", ["in_process", "shared_memory", "directory"])
def test_buckets_arrive(channel):
    sender = make_sender(channel, CONFIG, CPU)
    options = sender.connect([here(), here(rank=1)])
    assert len(options) == 1
    receivers = [make_receiver(channel, CPU, rank, options[0]) for rank in range(2)]
    for refit in range(2):
        sender.begin(manifest_of(tensors_of(0)))
        for receiver in receivers:
            receiver.begin(False)
        for index in range(5):
            tensors = tensors_of(10 * refit + index, count=4 + index)
            where = sender.put(index, tensors)
            for receiver in receivers:
                assert_same(receiver.receive(where, specs_of(tensors)).tensors, tensors)
                receiver.loaded()
            sender.acknowledged(index)
        sender.end()
        for receiver in receivers:
            receiver.end()
    for side in (sender, *receivers):
        side.close()
        side.close()


def test_in_process_hands_over_the_tensors_themselves():
    sender, receiver = in_process.Sender(CONFIG, CPU), in_process.Receiver(CPU, 0, {})
    tensors = tensors_of(0)
    for persistent in (True, False):
        receiver.begin(persistent)
        received = receiver.receive(sender.put(0, tensors), specs_of(tensors))
        assert [found is sent for found, sent in zip(received.tensors, tensors, strict=True)] == [True] * 4
        assert received.stable is persistent


def test_shared_memory_copies_once_and_keeps_its_segments():
    sender = shared_memory.Sender(CONFIG, CPU)
    receiver = shared_memory.Receiver(CPU, 0, sender.connect([here()])[0])
    tensors = tensors_of(0)
    first = receiver.receive(sender.put(0, tensors), specs_of(tensors))
    sender.put(1, tensors_of(1))
    assert_same(first.tensors, tensors)
    assert not first.stable
    places = [segment.buffer.data_ptr() for segment in sender._segments]
    again = receiver.receive(sender.put(2, tensors_of(2)), specs_of(tensors))
    assert_same(first.tensors, tensors_of(2))
    assert again.tensors[0].data_ptr() == first.tensors[0].data_ptr()
    assert [segment.buffer.data_ptr() for segment in sender._segments] == places
    sender.close()
    assert_same(again.tensors, tensors_of(2))


def test_shared_memory_leaves_nothing_behind_however_it_ends(tmp_path):
    """A sender that is killed, and a receiver in another process; Python's resource tracker has nothing to say."""
    code = """
        import os, socket, sys, time, torch
        from rlcore_vllm.channels.channel import EngineRank
        from rlcore_vllm.channels.shared_memory import Sender
        from rlcore_vllm.config import VllmConfig
        sender = Sender(VllmConfig(), torch.device("cpu"))
        place = EngineRank(replica=0, rank=0, pid=1, host=socket.gethostname(), device="cpu")
        options = sender.connect([place])[0]
        where = sender.put(0, [torch.arange(1000, dtype=torch.float32)])
        print(options["pid"], where["descriptor"], where["num_bytes"], flush=True)
        time.sleep(60)
    """
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pid, descriptor, num_bytes = map(int, process.stdout.readline().split())
    receiver = shared_memory.Receiver(CPU, 0, {"pid": pid})
    spec = TensorSpec(name="t", shape=(1000,), dtype="float32")
    (received,) = receiver.receive({"descriptor": descriptor, "num_bytes": num_bytes}, [spec]).tensors
    process.send_signal(signal.SIGKILL)
    assert process.communicate()[1] == b""
    assert torch.equal(received, torch.arange(1000, dtype=torch.float32))
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "rlcore" in name]
    del received
    receiver.close()
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if "rlcore-refit" in line]


def test_shared_memory_stays_on_one_machine():
    with pytest.raises(RefitError, match="reaches no other machine .found an engine on elsewhere."):
        shared_memory.Sender(CONFIG, CPU).connect([here(), here(replica=1, host="elsewhere")])


def test_a_files_name_says_that_it_is_complete(tmp_path, monkeypatch):
    sender = directory.Sender(evolve(CONFIG, refit_directory=str(tmp_path)), CPU)
    sender.begin(manifest_of(tensors_of(0)))
    save = directory.save_file
    written = []

    def watch(tensors, file):
        save(tensors, file)
        written.append((Path(file).name, [path.suffix for path in Path(file).parent.iterdir()]))

    monkeypatch.setattr(directory, "save_file", watch)
    where = sender.put(0, tensors_of(0))
    assert written == [("bucket-00000.part", [".part"])]
    assert len(load_file(where["file"])) == 4
    sender.acknowledged(0)
    assert not Path(where["file"]).exists()
    sender.end()
    assert not list(tmp_path.iterdir())


def test_a_folder_is_fresh_and_removed_with_what_was_not_taken(tmp_path):
    sender = directory.Sender(evolve(CONFIG, refit_directory=str(tmp_path)), CPU)
    folders = []
    for _ in range(2):
        sender.begin(manifest_of(tensors_of(0)))
        folders.append(Path(sender.put(0, tensors_of(0))["file"]).parent)
    assert folders[0] != folders[1]
    assert not folders[0].exists()
    sender.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("free", "expected"), [(10**12, Path("/dev/shm")), (100, None)])
def test_shared_memory_is_used_for_files_where_it_holds_them_twice(free, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    monkeypatch.setattr(directory.tempfile, "tempdir", str(tmp_path))
    sender = directory.Sender(CONFIG, CPU)
    sender.begin(manifest_of(tensors_of(0)))
    try:
        assert Path(sender.put(0, tensors_of(0))["file"]).parent.parent == (expected or tmp_path)
    finally:
        sender.close()


def test_a_file_that_the_receiver_does_not_see(tmp_path):
    receiver = directory.Receiver(CPU, 0, {})
    with pytest.raises(RefitError, match=r"not to be seen here. Set generator\.vllm\.refit_directory"):
        receiver.receive({"file": str(tmp_path / "elsewhere.safetensors")}, [])


@pytest.mark.parametrize("sender", [cuda_ipc.Sender, nccl.Sender])
def test_channels_between_gpus_need_a_trainer_on_one(sender):
    with pytest.raises(RefitError, match="needs a trainer on CUDA; found its weights on the CPU"):
        sender(CONFIG, CPU).connect([here()])


def test_nccl_needs_a_device_for_each_rank():
    places = [here(uuid="A"), here(rank=1, uuid="B"), here(replica=1, uuid="B")]
    with pytest.raises(RefitError, match="B has several"):
        nccl._refuse_shared_devices("C", places)
    nccl._refuse_shared_devices("C", places[:2])


class Replica:
    """A replica whose ranks answer as they are told to."""

    def __init__(self, name, answer):
        self.name = name
        self._answer = answer

    def call_workers(self, method, kwargs):
        assert method == "rlcore_refit"
        future = Future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        elif self._answer is not None:
            future.set_result(self._answer)
        return future


GOOD = Replica("good", [{}, {}])


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (Replica("bad", [{}, {"refused": "refit: no"}]), RefitError, r"^refit: no \(replica bad, rank 1\)$"),
        (Replica("bad", [{"failed": "OSError: x"}, {}]), RefitError, "bucket failed on replica bad, rank 0:\nOSError: x"),
        (Replica("bad", EOFError("gone")), WorkerError, r"replica bad failed in a refit \(bucket\): gone"),
        (Replica("bad", None), WorkerError, r"replica bad did not answer in a refit \(bucket\) within 0.1 s"),
    ],
)
def test_the_first_replica_that_fails_is_named(bad, error, message, monkeypatch):
    monkeypatch.setattr("rlcore_vllm.transfer._GRACE_S", 0.0)
    with pytest.raises(error, match=message):
        Receivers([GOOD, bad], 0.1).start_all("bucket", {}).wait()
    with pytest.raises(error, match=message):
        Receivers([bad, Replica("silent", None)] if bad._answer is not None else [bad], 0.1).start_all("bucket", {}).wait()


def test_a_channel_that_broke_is_noticed_while_waiting():
    def check():
        raise WorkerError("broken")

    with pytest.raises(WorkerError, match="broken"):
        Receivers([Replica("silent", None)], 60.0).start_all("bucket", {}).wait(check)
