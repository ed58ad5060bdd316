"""Every channel for whole tensors that reaches a CPU: what one side puts, the other receives."""

import pytest
from channel_support import CPU, assert_same, begin, here, specs_of, tensors_of

from rlcore.spi import installed_channels
from rlcore_vllm.channels import make_receiver, make_sender
from rlcore_vllm.setup.config import VllmConfig


@pytest.mark.parametrize(
    "channel", [name for name, row in sorted(installed_channels().items()) if "cpu" in row.devices and not row.sharded]
)
def test_buckets_arrive(channel):
    sender = make_sender(channel, VllmConfig(), CPU)
    options = sender.connect([here(), here(rank=1)])
    assert len(options) == 1
    receivers = [make_receiver(channel, CPU, rank, options[0]) for rank in range(2)]
    for refit in range(2):
        begin(sender, tensors_of(0))
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
