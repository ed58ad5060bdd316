"""The digest in Triton against its definition: by Triton's interpreter without a GPU, and by its compiler on one."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from rlcore.spi import tensor_digest

LENGTHS = (3, 0, 1, 2**16, 2**16 + 1, 2**17 + 4000)
"""Words of each tensor: none, and about one or two of the kernel's chunks."""
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def words() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-(2**31), 2**31, (length,), generator=generator, dtype=torch.int32) for length in LENGTHS]


def computed(device: str) -> list[list[int]]:
    """The digests of all of them, and of empty tensors alone."""
    from rlcore_torchkit.refit.digest_kernels import digest_sums

    groups = [words(), [torch.zeros(0, dtype=torch.int32)] * 2]
    return [[value % 2**64 for value in digest_sums([each.to(device) for each in group]).tolist()] for group in groups]


@pytest.mark.parametrize("device", ["interpreter", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])])
def test_many_tensors_have_the_digests_of_the_definition(device: str) -> None:
    pytest.importorskip("triton")
    if device == "cuda":
        found = computed("cuda")
    else:  # Triton decides when it is imported
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        found = json.loads(subprocess.run([sys.executable, __file__], env=environment, capture_output=True, check=True).stdout)
    assert found == [[tensor_digest(each.numpy()) for each in words()], [0, 0]]


if __name__ == "__main__":
    torch.cuda.device = lambda _: contextlib.nullcontext()
    sys.stdout.write(json.dumps(computed("cpu")))
