"""A rank's device, and a machine that has not got it."""

import pytest
import torch

from rlcore.spi import ConfigError, RankInfo
from rlcore_torchkit.distributed.device import use_device


def test_the_cpu_is_everywhere():
    assert use_device(RankInfo()) == torch.device("cpu")


def test_a_device_that_is_not_there_is_said():
    number = torch.cuda.device_count()
    with pytest.raises(ConfigError) as raised:
        use_device(RankInfo(device="cuda", rank=number, local_rank=number, world_size=number + 1))
    (problem,) = raised.value.problems
    assert problem.path == "run.device"
    assert f"{number} CUDA device(s)" in problem.found
