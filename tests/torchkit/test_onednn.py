"""Linear layers through oneDNN against torch's own, whatever processor this is."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore_torchkit.head import onednn
from rlcore_torchkit.head.onednn import (
    CACHED_OUTPUTS,
    CACHED_ROWS,
    FEWEST_ROWS,
    OneDnnLinear,
    add_linear,
    add_weight_gradient,
    linear,
    use_onednn,
)

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "width"), [((7, 12), 40), ((1, 9, 40), 12), ((2, 3, 5, 16), 16), ((1, 12), 3), ((2, 1100, 4), 6), ((0, 8), 4)]
)
def test_output_and_gradients_equal_those_of_torch(shape, width, bias):
    plain = nn.Linear(shape[-1], width, bias=bias)
    ours = nn.Linear(shape[-1], width, bias=bias)
    ours.load_state_dict(plain.state_dict())
    ours.__class__ = OneDnnLinear
    results = []
    for layer in (plain, ours):
        input = torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).view(shape).requires_grad_()
        output = layer(input)
        output *= torch.linspace(0.5, 2.0, output.numel()).view_as(output)  # in place, as some models go on
        output.sum().backward()
        results.append([output, input.grad, *(parameter.grad for parameter in layer.parameters())])
    for found, expected in zip(reversed(results[1]), reversed(results[0]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_frozen_weights_and_inputs_need_no_gradient():
    layer = OneDnnLinear(4, 3).requires_grad_(False)
    input = torch.randn(2, 4, requires_grad=True)
    layer(input).sum().backward()
    torch.testing.assert_close(input.grad, layer.weight.sum(0).expand(2, 4))
    assert layer.weight.grad is None


def test_other_dtypes_take_the_usual_way():
    layer = OneDnnLinear(8, 4).bfloat16()
    input = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(layer(input), nn.functional.linear(input, layer.weight, layer.bias))


@pytest.fixture
def products(monkeypatch):
    """The products that oneDNN computes, as on a processor where it is faster."""
    seen = Products()
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    with seen:
        yield seen.names


class Products(TorchDispatchMode):
    """The operations that are called, oneDNN's alone: their names, and weights."""

    def __init__(self):
        super().__init__()
        self.names, self.weights = [], []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if operation.namespace == "mkldnn":
            self.names.append(operation.name())
            self.weights.append(arguments[1])
        return operation(*arguments, **(options or {}))


def test_parts_of_wider_matrices_are_multiplied_as_whole_ones():
    """Gradients are such parts where a layer's output was put behind another's, and inputs where one was divided."""
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(40, 27, generator=generator)
    layer = OneDnnLinear(9, 5)
    rows = wide[:, 9:18].requires_grad_()
    with Products() as seen:
        output = layer(rows)
        torch.cat([output, wide[:, :5]], 1).mul(wide[:, :10]).sum().backward()
    expected = nn.Linear(9, 5).double()
    expected.load_state_dict(layer.state_dict())
    exact = rows.detach().double().requires_grad_()
    expected(exact).mul(wide[:, :5]).sum().backward()
    torch.testing.assert_close(rows.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    for found, right in zip(layer.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad.double(), right.grad, rtol=1e-5, atol=1e-5)
    assert len(seen.weights) == 3
    assert all(weight.is_contiguous() or weight.T.is_contiguous() for weight in seen.weights)


@pytest.mark.parametrize("num_rows", [1, FEWEST_ROWS - 1, FEWEST_ROWS, 1100])
@pytest.mark.parametrize("bias", [None, torch.randn(5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)])
def test_products_without_a_gradient_equal_those_of_float64(num_rows, bias, products):
    generator = torch.Generator().manual_seed(num_rows)
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((num_rows, 9), (5, 9), (num_rows, 5))]
    rows, weight, others = (factor.float() for factor in exact)
    narrow = None if bias is None else bias.float()
    expected = exact[0] @ exact[1].T + (0.0 if bias is None else bias)
    torch.testing.assert_close(linear(rows, weight, narrow).double(), expected, rtol=1e-5, atol=1e-5)
    added = add_linear(others, rows, weight, narrow).double()
    torch.testing.assert_close(added, exact[2] + expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(others, exact[2].float()), "what is added to stays"
    total = torch.ones(5, 9)
    add_weight_gradient(total, others, rows)
    torch.testing.assert_close(total.double(), 1.0 + exact[2].T @ exact[0], rtol=1e-4, atol=1e-4)
    assert bool(products) == (num_rows >= FEWEST_ROWS)


def test_products_of_other_dtypes_and_under_autocast_are_torchs_own(products):
    rows, weight = torch.randn(64, 9), torch.randn(5, 9)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(linear(rows.to(dtype), weight.to(dtype)), nn.functional.linear(rows.to(dtype), weight.to(dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(rows, weight).dtype == torch.bfloat16
    assert products == []


@pytest.mark.parametrize("num_rows", [FEWEST_ROWS, CACHED_ROWS, CACHED_ROWS + 1])
def test_few_rows_make_the_gradient_of_a_large_vocabulary_in_parts(num_rows, products):
    """A second tensor of its size would cost more time than oneDNN gains, and as much memory as the gradient."""
    generator = torch.Generator().manual_seed(5)
    rows, grad_rows = (torch.randn(num_rows, size, generator=generator) for size in (8, 3 * CACHED_OUTPUTS + 1))
    total = torch.ones(grad_rows.shape[1], 8)
    add_weight_gradient(total, grad_rows, rows)
    torch.testing.assert_close(total.double(), 1.0 + grad_rows.double().T @ rows.double(), rtol=1e-4, atol=2e-4)
    assert len(products) == (4 if num_rows <= CACHED_ROWS else 2)


@pytest.mark.parametrize(
    ("capability", "vendor", "expected"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_used_only_where_it_is_faster(capability, vendor, expected, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(onednn, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    onednn.is_faster.cache_clear()
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    names = list(model.state_dict())
    try:
        use_onednn(model)
    finally:
        onednn.is_faster.cache_clear()
    assert (type(model[0]) is OneDnnLinear) == expected
    assert type(model[1]) is nn.LayerNorm
    assert list(model.state_dict()) == names
