"""The channels by which weights travel from trainer to generator: one row each, which both sides and the driver read.

A channel is added by a row here, and in a generator's package by the code of its two ends. The driver chooses by the rows
alone.
"""

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class RefitChannel:
    """One way for weights to travel."""

    name: str
    """What `refit.channel` and the requests call it."""
    devices: frozenset[str]
    """The devices ("cpu", "cuda") of trainers whose weights it can carry."""
    reach: Literal["process", "shared", "separate", "any"]
    """Where it finds the generator: in the trainer's own process, on the trainer's devices, on devices of the generator's own,
    or anywhere."""
    sharded: bool = False
    """Whether weights travel as the parts that the trainer's ranks hold (ExportWeightsRequest.sharded)."""
    delta: bool = False
    """Whether it can carry changes alone (RefitRequest.delta, and ExportWeightsRequest.delta where it is `sharded`)."""

    @property
    def capability(self) -> str:
        """What a trainer and a generator that have it declare."""
        return f"refit.{self.name}"


_CHEAPEST_FIRST = (
    # The receiver maps the sender's memory, which costs no more than handing tensors over within a process, and leaves the
    # generator an interpreter of its own.
    RefitChannel(name="cuda_ipc", devices=frozenset({"cuda"}), reach="shared"),
    # Buckets are broadcast from the trainer's GPU to every receiver at once.
    RefitChannel(name="nccl", devices=frozenset({"cuda"}), reach="separate"),
    # The tensors themselves; with RefitRequest.may_alias without a copy.
    RefitChannel(name="in_process", devices=frozenset({"cpu", "cuda"}), reach="process"),
    # Between processes of one machine, through memory that both map.
    RefitChannel(name="shared_memory", devices=frozenset({"cpu"}), reach="shared"),
    # Each rank's parts, from rank to rank: by NCCL or, on CPUs, by gloo.
    RefitChannel(name="shards", devices=frozenset({"cpu", "cuda"}), reach="separate", sharded=True, delta=True),
    # Safetensors files in a folder that both sides see.
    RefitChannel(name="directory", devices=frozenset({"cpu", "cuda"}), reach="any", delta=True),
)
CHANNELS: dict[str, RefitChannel] = {channel.name: channel for channel in _CHEAPEST_FIRST}
"""Every channel by its name, the cheapest first."""


def channel_capabilities() -> frozenset[str]:
    """The capabilities of all channels for whole tensors. A trainer that exports torch tensors on its own device declares them
    all, since the generator's side moves the tensors."""
    return frozenset(channel.capability for channel in CHANNELS.values() if not channel.sharded)
