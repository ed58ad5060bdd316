"""Digests of all tensors that a model computes with."""

import torch
from torch import nn

from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_torchkit.refit.held_digests import held_digests


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).T)
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
        self.absorbed = torch.full((5,), 3.0)
        self.kv_cache = torch.ones(4)
        self.packed = nn.Parameter(torch.empty(0))


def test_parameters_buffers_and_attributes_count_and_caches_do_not():
    model = nn.Sequential(Layer())
    expected = [torch.ones(3, 2), torch.ones(2, dtype=torch.bfloat16), torch.full((5,), 3.0)]
    assert held_digests(model) == dict(zip(["0.weight", "0.scale", "0.absorbed"], tensor_digests(expected), strict=True))
    assert held_digests(Layer()).keys() == {"weight", "scale", "absorbed"}
    before = held_digests(model)
    model[0].absorbed += 1
    assert {name for name, digest in held_digests(model).items() if digest != before[name]} == {"0.absorbed"}


def test_what_stands_for_a_packed_tensor_has_its_name():
    shown = torch.arange(3.0)
    digests = held_digests(Layer(), lambda layer, name: shown if name == "packed" else None)
    assert digests["packed"] == tensor_digests([shown])[0]
