"""AdamW's step as one kernel, against decoding, torch's AdamW and encoding; and masters of bfloat16 weights."""

import pytest
import torch
from torch.optim.adamw import adamw

from rlcore_torchkit.optimizer import one_pass
from rlcore_torchkit.optimizer.moments import Columns, decode, encode
from rlcore_torchkit.optimizer.one_pass import divided, joined, step_numbers, takes, update_in_one_pass
from rlcore_torchkit.optimizer.settings import TensorSettings

ROWS, WIDTH, NUM_STEPS, FACTOR, RATE, EPS = 24, 768, 4, 0.5, 1e-3, 1e-8
SETTINGS = TensorSettings(
    method="adamw",
    learning_rate=RATE,
    betas=(0.9, 0.999),
    weight_decay=0.1,
    eight_bit=True,
    follows_betas=True,
    follows_decay=True,
)
COLUMNS = Columns(first=0, stop=WIDTH, width=WIDTH)
PART = Columns(first=256, stop=768, width=1000)


def gradients(number, device="cpu"):
    random = torch.Generator().manual_seed(number)
    scale = 10.0 ** torch.randint(-6, 0, (ROWS, WIDTH), generator=random)
    return (torch.randn(ROWS, WIDTH, generator=random) * scale).to(device)


def state(device="cpu", columns=COLUMNS):
    codes = [torch.zeros(ROWS, WIDTH, dtype=torch.uint8, device=device) for _ in range(2)]
    return codes, [torch.zeros(ROWS, columns.num_blocks, device=device) for _ in range(2)]


def by_operators(masters, codes, scales, number):
    """On the CPU, whose kernel of AdamW has double coefficients; that of GPUs takes 1 - 0.999 in float32, 1.3e-5 too much."""
    moments = [decode(*both, COLUMNS, signed=signed) for *both, signed in zip(codes, scales, (True, False), strict=True)]
    options = {"beta1": 0.9, "beta2": 0.999, "lr": RATE, "weight_decay": 0.1, "eps": EPS, "amsgrad": False, "maximize": False}
    given = gradients(number).bfloat16().float() * FACTOR
    adamw([masters], [given], *([moment] for moment in moments), [], [torch.tensor(float(number - 1))], fused=True, **options)
    for moment, kept, scale, signed in zip(moments, codes, scales, (True, False), strict=True):
        scale.copy_(COLUMNS.scales(moment))
        kept.copy_(encode(moment, scale, COLUMNS, signed=signed))


def check_steps(device, *, narrow):
    """Compare masters, codes and scales after every step; codes within one, where rounding decides."""
    masters = gradients(0)
    (own_codes, own_scales), (codes, scales) = state(device), state()
    weights, remainders = divided(masters.to(device)) if narrow else (masters.to(device, copy=True), None)
    for number in range(1, NUM_STEPS + 1):
        before = masters.clone()
        by_operators(masters, codes, scales, number)
        numbers = step_numbers(SETTINGS, RATE, EPS, torch.tensor(number, device=device), FACTOR)
        update_in_one_pass(weights, remainders, gradients(number, device).bfloat16(), own_codes, own_scales, numbers)
        found = (joined(weights, remainders) if narrow else weights).cpu()
        largest = (masters - before).abs().max().item()
        torch.testing.assert_close(found, masters, rtol=1e-6, atol=5e-7 * largest)
        for ours, theirs in zip(own_scales, scales, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=0.0)
        for ours, theirs in zip(own_codes, codes, strict=True):
            difference = (ours.cpu().int() - theirs.int()).abs()
            assert difference.max() <= 1
            assert (difference > 0).float().mean() < 0.002
            theirs.copy_(ours)


@pytest.mark.parametrize("narrow", [False, True])
def test_steps_are_those_of_operators(narrow, monkeypatch):
    monkeypatch.setattr(one_pass, "compiled", lambda: one_pass.update)
    check_steps("cpu", narrow=narrow)


def test_a_compiler_makes_the_same_of_it():
    check_steps("cpu", narrow=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("narrow", [False, True])
def test_steps_on_a_gpu(narrow):
    check_steps("cuda", narrow=narrow)


def test_columns_of_a_rank_update_their_own_scales(monkeypatch):
    monkeypatch.setattr(one_pass, "compiled", lambda: one_pass.update)
    (codes, scales), (other_codes, other_scales) = state(columns=PART), state()
    numbers = step_numbers(SETTINGS, RATE, EPS, torch.tensor(1))
    whole, part = gradients(0), gradients(0)[:, :512].clone()
    update_in_one_pass(whole, None, gradients(1), other_codes, other_scales, numbers)
    narrow = [code[:, :512].clone() for code in codes]
    update_in_one_pass(part, None, gradients(1)[:, :512].clone(), narrow, [scale[:, PART.blocks] for scale in scales], numbers)
    assert torch.equal(part, whole[:, :512])
    for scale, other in zip(scales, other_scales, strict=True):
        assert torch.equal(scale[:, 1:3], other[:, :2])
        assert scale[:, [0, 3]].abs().max() == 0.0


def test_what_it_takes():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert takes(COLUMNS, cuda)
    assert takes(PART, cuda)
    assert not takes(COLUMNS, cpu)
    for first, stop in ((0, 700), (100, 512), (768, 1000)):
        assert not takes(Columns(first=first, stop=stop, width=1000), cuda)
