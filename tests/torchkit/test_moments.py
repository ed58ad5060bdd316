"""Moments in 8 bits against torchao's, and in parts of rows against whole ones."""

from itertools import pairwise

import pytest
import torch

from rlcore_torchkit.optimizer import settings
from rlcore_torchkit.optimizer.moments import Columns, code_values, decode, encode, row_parts


def values_of(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-6, 2, shape, generator=generator)


@pytest.mark.parametrize("signed", [True, False])
def test_whole_blocks_are_those_of_torchao(signed):
    from torchao.optim.subclass_8bit import OptimState8bit

    values = values_of(6, 512) if signed else values_of(6, 512).abs()
    expected = OptimState8bit.zeros((6, 512), signed, 256)
    expected.copy_(values)
    columns = Columns(first=0, stop=512, width=512)
    scales = columns.scales(values)
    codes = encode(values, scales, columns, signed=signed)
    assert torch.equal(codes, expected.codes)
    torch.testing.assert_close(scales.flatten(), expected.scale)
    assert torch.equal(decode(codes, scales, columns, signed=signed), expected.dequantize())


@pytest.mark.parametrize("cuts", [(0, 700), (0, 256, 700), (0, 100, 300, 301, 700), (0, 0, 512, 700)])
def test_parts_of_rows_have_the_codes_of_whole_rows(cuts):
    values, whole = values_of(2, 3, 700), Columns(first=0, stop=700, width=700)
    scales = whole.scales(values)
    expected = encode(values, scales, whole, signed=True)
    parts = [Columns(first=first, stop=stop, width=700) for first, stop in pairwise(cuts)]
    shared = torch.stack([part.scales(values[..., part.first : part.stop]) for part in parts]).amax(0)
    assert torch.equal(shared, scales)
    found = [encode(values[..., part.first : part.stop], shared, part, signed=True) for part in parts]
    assert torch.equal(torch.cat(found, -1), expected)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_torchaos_to_the_last_bit(signed):
    """At each value of the map, halfway between two, and at the floats beside these, under a scale of 1."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    values = code_values(signed, torch.device("cpu"))
    edges = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.rand(4096) * 2 - 1, torch.randn(4096) * 1e-5])
    shares = torch.cat([edges, *(torch.nextafter(edges, torch.tensor(end)) for end in (-2.0, 2.0))]).clip(-1.0, 1.0)
    columns = Columns(first=0, stop=len(shares), width=len(shares))
    found = encode(shares, torch.ones(columns.num_blocks), columns, signed=signed)
    torch.testing.assert_close(found, quantize_8bit_with_qmap(shares, values), rtol=0, atol=0)


def test_nothing_stays_nothing():
    columns = Columns(first=0, stop=300, width=300)
    scales = columns.scales(torch.zeros(2, 300))
    assert scales.shape == (2, 2)
    for signed in (True, False):
        codes = encode(torch.zeros(2, 300), scales, columns, signed=signed)
        assert decode(codes, scales, columns, signed=signed).abs().max() == 0.0
        assert decode(torch.zeros_like(codes), scales, columns, signed=signed).abs().max() == 0.0


@pytest.mark.parametrize(
    ("shape", "num_parts"),
    [((4, 8), 1), ((9, 8), 3), ((0, 8), 0), ((3, 40), 3), ((4, 2, 8), 2), ((2, 9, 8), 6), ((0, 9, 8), 0), ((2, 3, 40), 6)],
)
def test_parts_of_rows_are_the_tensor(monkeypatch, shape, num_parts):
    monkeypatch.setattr(settings, "DECODED_ELEMENTS", 32)
    found, parts = torch.zeros(shape), list(row_parts(shape))
    for part in parts:
        found[part] += 1
        assert found[part].numel() <= max(32, shape[-1])
    assert (found == 1).all()
    assert len(parts) == num_parts
