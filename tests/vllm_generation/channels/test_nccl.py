"""What NCCL's broadcasts refuse without GPUs; with them, test_transfer_gpu has them."""

import pytest
from channel_support import CPU, OPTIONS, here

from rlcore.spi import RefitError
from rlcore_vllm.channels import nccl


def test_it_needs_a_trainer_on_a_gpu():
    with pytest.raises(RefitError, match="trainer on CUDA; .* CPU"):
        nccl.Sender(OPTIONS, CPU).connect([here()])


def test_nccl_needs_a_device_for_each_rank():
    places = [here(uuid="A"), here(rank=1, uuid="B"), here(replica=1, uuid="B")]
    with pytest.raises(RefitError, match="B has several"):
        nccl.refuse_shared_devices("C", places)
    nccl.refuse_shared_devices("C", places[:2])
