"""AdamW and the gradient's norm against their formulas in float64."""

import numpy as np
import pytest
import torch
from attrs import evolve
from fake_ranks import on_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rlcore.spi import OptimizerSpec
from rlcore_fsdp2 import optimizer as fsdp2_optimizer
from rlcore_fsdp2.optimizer import Optimizer, clip, local_norms, squared_norm
from rlcore_fsdp2.trained_parameters import TrainedParameter
from rlcore_torchkit.optimizer import one_pass, settings
from rlcore_torchkit.optimizer.settings import tensor_settings

SPEC = OptimizerSpec(learning_rate=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)


def make_optimizer(model, spec):
    members = [
        TrainedParameter(
            name=name, parameter=parameter, settings=tensor_settings(spec, name, tuple(parameter.shape), in_layers=False)
        )
        for name, parameter in model.named_parameters()
    ]
    return Optimizer(members, spec, torch.device("cpu"))


def gradients_of(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def adamw(weight, gradients, decay):
    """Loshchilov and Hutter (arXiv:1711.05101, algorithm 2), in float64."""
    first = second = np.zeros_like(weight)
    for step, gradient in enumerate(gradients, 1):
        first = SPEC.betas[0] * first + (1 - SPEC.betas[0]) * gradient
        second = SPEC.betas[1] * second + (1 - SPEC.betas[1]) * gradient**2
        corrected = first / (1 - SPEC.betas[0] ** step), second / (1 - SPEC.betas[1] ** step)
        weight = weight - SPEC.learning_rate * (corrected[0] / (np.sqrt(corrected[1]) + SPEC.eps) + decay * weight)
    return weight


def test_steps_are_those_of_the_formula_and_vectors_do_not_decay():
    model = nn.Linear(4, 3)
    steps = [gradients_of((3, 4), (3,)) for _ in range(3)]
    columns = zip(*[[tensor.double().numpy() for tensor in step] for step in steps], strict=True)
    expected = [
        adamw(parameter.detach().double().numpy(), column, SPEC.weight_decay * (parameter.ndim > 1))
        for parameter, column in zip(model.parameters(), columns, strict=True)
    ]
    optimizer = make_optimizer(model, SPEC)
    for step in steps:
        for parameter, gradient in zip(model.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step(1.0)
    for parameter, right in zip(model.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), right, rtol=1e-5, atol=1e-7)


def test_biases_of_all_experts_in_one_matrix_do_not_decay():
    """Without a gradient, decay alone moves a weight."""
    model = nn.Module()
    for name in ("gate_up_proj", "gate_up_proj_bias"):
        model.register_parameter(name, nn.Parameter(torch.ones(2, 4)))
        model.get_parameter(name).grad = torch.zeros(2, 4)
    make_optimizer(model, SPEC).step(1.0)
    assert torch.equal(model.gate_up_proj_bias, torch.ones(2, 4))
    torch.testing.assert_close(model.gate_up_proj, torch.full((2, 4), 1 - SPEC.learning_rate * SPEC.weight_decay))


def test_moments_in_8_bits_are_those_of_torchao():
    """In rows of whole blocks; a vector, and a matrix with fewer than 4096 elements, keep float32."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    model = nn.Module()
    for name, shape in {"large": (16, 512), "small": (8, 256), "vector": (8192,)}.items():
        model.register_parameter(name, nn.Parameter(torch.ones(shape)))
    spec = evolve(SPEC, moments="8bit")
    optimizer = make_optimizer(model, spec)
    expected = torch.ones(16, 512)
    moments = [OptimState8bit.zeros((16, 512), signed, 256) for signed in (True, False)]
    for number, gradient in enumerate(gradients_of((16, 512), (16, 512), (16, 512)), 1):
        for parameter in model.parameters():
            parameter.grad = gradient.flatten()[: parameter.numel()].view(parameter.shape).clone()
        optimizer.step(1.0)
        options = spec.learning_rate, *spec.betas, spec.weight_decay, spec.eps, True, False
        single_param_adam(expected, gradient, torch.tensor(float(number)), *moments, None, *options)
    torch.testing.assert_close(model.large.detach(), expected, rtol=0.0, atol=1e-6)
    state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert {name: held["exp_avg"].dtype for name, held in state.items()} == {
        "large": torch.uint8,
        "small": torch.float32,
        "vector": torch.float32,
    }
    assert state["large"]["exp_avg_sq_scale"].shape == (16, 2)


@pytest.mark.parametrize("shape", [(24, 300), (3, 8, 300)])
def test_moments_in_8_bits_of_a_few_rows_at_a_time_are_the_same(monkeypatch, shape):
    found = []
    for most in (settings.DECODED_ELEMENTS, 700):
        monkeypatch.setattr(settings, "DECODED_ELEMENTS", most)
        model = nn.ParameterDict({"weight": torch.ones(shape)})
        optimizer = make_optimizer(model, evolve(SPEC, moments="8bit"))
        for gradient in gradients_of(shape, shape):
            model["weight"].grad = gradient
            optimizer.step(1.0)
        found.append({"weight": model["weight"].detach(), **optimizer.state[model["weight"]]})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert found[0]["step"] == 2


def test_the_norm_is_that_of_all_gradients_together():
    gradients = gradients_of((3, 4), (5,), (2, 2, 2))
    norms = [np.linalg.norm(gradient.double().numpy()) for gradient in gradients]
    np.testing.assert_allclose(local_norms(gradients).numpy(), norms, rtol=1e-6)
    assert local_norms(gradients).dtype == torch.float64
    assert squared_norm(gradients).item() == pytest.approx(np.square(norms).sum(), rel=1e-6)


def test_elements_on_several_ranks_count_once():
    """The ranks' summands of a divided, a repeated and a partly repeated gradient add up to the square of the whole's norm."""
    whole = gradients_of((6, 2), (4, 4), (5, 3))
    placements = [(Shard(0), Shard(0)), (Replicate(), Replicate()), (Replicate(), Shard(0))]
    total = 0.0
    for rank in range(4):
        with on_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            parts = [distribute_tensor(*given, src_data_rank=None) for given in zip(whole, [mesh] * 3, placements, strict=True)]
            total += squared_norm(parts).item()
    assert total == pytest.approx(squared_norm(whole).item(), rel=1e-6)


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (100.0, 1.0), (0.5, None)])
def test_gradients_are_scaled_where_their_norm_exceeds_the_limit(max_norm, factor):
    gradients = gradients_of((3, 4), (5,))
    before = [gradient.clone() for gradient in gradients]
    norm = squared_norm(gradients).item() ** 0.5
    clip(gradients, norm, max_norm)
    for gradient, was in zip(gradients, before, strict=True):
        torch.testing.assert_close(gradient, was * (max_norm / norm if factor is None else factor))
    assert squared_norm(gradients).item() ** 0.5 == pytest.approx(max_norm if factor is None else norm, rel=1e-5)


def test_one_pass_is_the_step_by_operators(monkeypatch):
    """Matrices with rows of whole blocks, and with other rows."""
    spec, calls = evolve(SPEC, moments="8bit"), []

    def counted(*arguments):
        calls.append(arguments[0].shape)
        one_pass.update(*arguments)

    monkeypatch.setattr(one_pass, "compiled", lambda: counted)
    torch.manual_seed(0)
    models = [nn.ParameterDict({"whole": torch.randn(16, 512), "cut": torch.randn(16, 300)}) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    by_operators, in_one_pass = (make_optimizer(model, spec) for model in models)
    for number in range(3):
        for model, optimizer in zip(models, (by_operators, in_one_pass), strict=True):
            for parameter, gradient in zip(model.parameters(), gradients_of((16, 300), (16, 512)), strict=True):
                parameter.grad = gradient * (number + 1)
            with monkeypatch.context() as patch:
                if optimizer is in_one_pass:
                    patch.setattr(fsdp2_optimizer, "takes", lambda columns, _: one_pass.takes(columns, torch.device("cuda")))
                optimizer.step(1.0)
    assert calls == [(16 * 512,)] * 3
    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        distance = (found - expected).abs() / SPEC.learning_rate
        assert (distance > 1e-3).float().mean() < 1e-3
        assert distance.max() < 0.2  # a code that rounding made the next one
