"""Places, tensors and their announcements, for channels without an engine."""

import os

import torch
from attrs import evolve

from rlcore.spi import ChannelOptions, ReceiverRank, TensorSpec

CPU = torch.device("cpu")
OPTIONS = ChannelOptions(timeout_s=0.2)


def here(replica=0, rank=0, **changes):
    place = ReceiverRank(replica=replica, rank=rank, pid=os.getpid(), host=os.uname().nodename, device="cpu")
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


def begin(sender, tensors, delta="off", *, persistent=False):
    sender.begin(tuple(specs_of(tensors)), persistent=persistent, delta=delta)


def assert_same(received, tensors):
    assert all(torch.equal(found, sent) and found.dtype == sent.dtype for found, sent in zip(received, tensors, strict=True))
