"""Gradients are reduced after every microbatch where they would not fit until the last one; ranks agree on it."""

import pytest
import torch
from torch import nn

from rlcore_fsdp2.config import MOST_HELD
from rlcore_fsdp2.gradients import held_elements, reduces_every_microbatch

PARAMETERS = [nn.Parameter(torch.zeros(100, 10)), nn.Parameter(torch.zeros(10))]
FITS = int(4 * 1010 / MOST_HELD) + 1


@pytest.mark.parametrize(
    ("wanted", "memory_bytes", "expected"),
    [(None, FITS, False), (None, FITS // 2, True), (None, None, False), (False, 1, False), (True, None, True)],
)
def test_the_section_says_or_the_devices_memory(wanted, memory_bytes, expected):
    assert reduces_every_microbatch(wanted, PARAMETERS, memory_bytes) is expected


def test_a_whole_parameter_is_held_whole():
    assert [held_elements(parameter) for parameter in PARAMETERS] == [1000, 10]
