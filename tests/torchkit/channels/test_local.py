"""Both ends of a channel in one process: an export arrives as it was sent, and a refit that fails leaves nothing open."""

import pytest
import torch
from channel_support import CPU, specs_of, tensors_of

from rlcore.spi import ChannelOptions, NamedTensor, WeightBucket, WeightExport, find_channel
from rlcore_torchkit.channels.local import LocalChannel
from rlcore_torchkit.refit.digest import tensor_digest


def export_of(tensors, *, fails=False):
    named = [
        NamedTensor(name=spec.name, tensor=tensor, digest=tensor_digest(tensor))
        for spec, tensor in zip(specs_of(tensors), tensors, strict=True)
    ]

    def buckets():
        yield WeightBucket(tensors=tuple(named[:3]))
        if fails:
            raise ValueError("the trainer is gone")
        yield WeightBucket(tensors=tuple(named[3:]))

    return WeightExport(weight_version=1, specs=tuple(specs_of(tensors)), buckets=buckets(), persistent=True)


@pytest.mark.parametrize("name", ["directory", "shared_memory"])
def test_an_export_arrives_again_and_again(name, tmp_path):
    channel = LocalChannel(find_channel(name), CPU, ChannelOptions(directory=str(tmp_path)))
    for seed in range(3):
        sent = tensors_of(seed, 6)
        if seed == 1:
            with pytest.raises(ValueError, match="is gone"):
                list(channel.received(export_of(sent, fails=True)).buckets)
            continue
        export = channel.received(export_of(sent))
        received = [(named, named.tensor.clone()) for bucket in export.buckets for named in bucket.tensors]
        assert not export.persistent
        assert all(torch.equal(tensor, expected) for (_, tensor), expected in zip(received, sent, strict=True))
        assert all(named.digest == tensor_digest(tensor) for named, tensor in received)
        assert all(named.tensor.data_ptr() != tensor.data_ptr() for (named, _), tensor in zip(received, sent, strict=True))
    channel.close()
    assert not list(tmp_path.iterdir())
