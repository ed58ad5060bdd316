"""What CUDA's memory handles refuse without a GPU; with one, test_transfer_gpu has them."""

import pytest

from rlcore.spi import RefitError
from rlcore_vllm.channels import cuda_ipc

from .channel_support import CONFIG, CPU, here


def test_it_needs_a_trainer_on_a_gpu():
    with pytest.raises(RefitError, match="trainer on CUDA; .* CPU"):
        cuda_ipc.Sender(CONFIG, CPU).connect([here()])
