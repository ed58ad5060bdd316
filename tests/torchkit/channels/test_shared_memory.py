"""Memory that both sides map, and what is left of it."""

import gc
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from channel_support import CPU, OPTIONS, assert_same, here, specs_of, tensors_of

from rlcore.spi import RefitError, TensorSpec
from rlcore_torchkit.channels import shared_memory


def test_shared_memory_copies_once_and_keeps_its_segments():
    sender = shared_memory.Sender(OPTIONS, CPU)
    receiver = shared_memory.Receiver(CPU, 0, sender.connect([here()])[0])
    tensors = tensors_of(0)
    first = receiver.receive(sender.put(0, tensors), specs_of(tensors))
    sender.put(1, tensors_of(1))
    assert_same(first.tensors, tensors)
    assert not first.stable
    places = [segment.buffer.data_ptr() for segment in sender.segments]
    again = receiver.receive(sender.put(2, tensors_of(2)), specs_of(tensors))
    assert_same(first.tensors, tensors_of(2))
    assert again.tensors[0].data_ptr() == first.tensors[0].data_ptr()
    assert [segment.buffer.data_ptr() for segment in sender.segments] == places
    sender.close()
    assert_same(again.tensors, tensors_of(2))


def test_shared_memory_leaves_nothing_behind_however_it_ends(tmp_path):
    """A sender that is killed, and a receiver in another process; Python's resource tracker has nothing to say."""
    code = """
        import os, socket, sys, time, torch
        from rlcore.spi import ChannelOptions, ReceiverRank
        from rlcore_torchkit.channels.shared_memory import Sender
        sender = Sender(ChannelOptions(), torch.device("cpu"))
        place = ReceiverRank(replica=0, rank=0, pid=1, host=socket.gethostname(), device="cpu")
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
    with pytest.raises(RefitError, match="an engine on elsewhere"):
        shared_memory.Sender(OPTIONS, CPU).connect([here(), here(replica=1, host="elsewhere")])
