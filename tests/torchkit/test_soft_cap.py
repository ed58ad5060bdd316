"""Soft caps of logits against their formula in float64."""

import torch

from rlcore_torchkit.head.sampling_mask import cap_slopes, soft_capped


def test_capped_logits_and_their_slopes_are_the_formulas() -> None:
    logits = torch.linspace(-9.0, 9.0, 12).view(3, 4)
    wide = logits.double().requires_grad_()
    expected = 2.0 * torch.tanh(wide / 2.0)
    expected.sum().backward()
    found = soft_capped(logits, 2.0)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0.0)
    torch.testing.assert_close(cap_slopes(found, 2.0).double(), wide.grad, atol=1e-6, rtol=0.0)
    assert soft_capped(logits.bfloat16(), 2.0).dtype == torch.float32
    assert logits[0, 0] == -9.0, "the logits are not overwritten"


def test_tokens_that_were_left_out_have_no_slope() -> None:
    assert cap_slopes(torch.tensor([[-1e30, 0.0]]), 30.0).tolist() == [[0.0, 1.0]]
