"""On CUDA: the product against float64, and each row's bits beside any others."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("size", "num_columns"), [(64, 128), (96, 1000), (1024, 4096)])
def test_rows_are_the_same_in_any_batch(size, num_columns):
    from rlcore_torchkit.head.head_kernels import product

    random = torch.Generator("cuda").manual_seed(0)
    states, head = (torch.randn(rows, size, generator=random, device="cuda").bfloat16() for rows in (300, num_columns))
    whole = product(states, head)
    torch.testing.assert_close(whole.double(), states.double() @ head.double().T, rtol=1e-5, atol=1e-3)
    for rows in (1, 7, 64, 256):
        assert torch.equal(product(states[-rows:], head), whole[-rows:])
    assert product(states[:0], head).shape == (0, num_columns)
