"""What CUDA's memory handles refuse without a GPU; with one, test_transfer_gpu has them."""

import pytest
from channel_support import CPU, OPTIONS, here

from rlcore.spi import RefitError
from rlcore_torchkit.channels import cuda_ipc


def test_it_needs_a_trainer_on_a_gpu():
    with pytest.raises(RefitError, match="trainer on CUDA; .* CPU"):
        cuda_ipc.Sender(OPTIONS, CPU).connect([here()])
