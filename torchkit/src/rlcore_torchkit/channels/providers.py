"""The entry points of the channels, which import no torch."""

from rlcore.spi import ChannelProvider

_PACKAGE = "rlcore_torchkit.channels"

CUDA_IPC = ChannelProvider(
    name="cuda_ipc",
    spi=(2, 0),
    # The receiver maps the sender's memory, which costs no more than handing tensors over within a process, and leaves the
    # generator an interpreter of its own.
    cost=10,
    devices={"cuda"},
    reach="shared",
    sender=f"{_PACKAGE}.cuda_ipc:Sender",
    receiver=f"{_PACKAGE}.cuda_ipc:Receiver",
)
"""The trainer's memory on a GPU, mapped by the generator's process."""
SHARED_MEMORY = ChannelProvider(
    name="shared_memory",
    spi=(2, 0),
    cost=40,
    devices={"cpu"},
    reach="shared",
    sender=f"{_PACKAGE}.shared_memory:Sender",
    receiver=f"{_PACKAGE}.shared_memory:Receiver",
)
"""Memory of one machine that both processes map."""
SHARDS = ChannelProvider(
    name="shards", spi=(2, 0), cost=50, devices={"cpu", "cuda"}, reach="separate", sharded=True, delta=True
)
"""Each rank's parts, from rank to rank, by NCCL or gloo: `shard_sender` and `shard_receiver` are what backends build it of."""
DIRECTORY = ChannelProvider(
    name="directory",
    spi=(2, 0),
    cost=60,
    devices={"cpu", "cuda"},
    reach="anywhere",
    delta=True,
    sender=f"{_PACKAGE}.directory:Sender",
    receiver=f"{_PACKAGE}.directory:Receiver",
)
"""Safetensors files in a folder that both sides see."""
