"""Adapters in a vLLM model; with real engines the conformance kit and whole runs look at what they compute."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

from rlcore.spi import LoraSpec, RefitError
from rlcore_vllm.ranks.adapters import put_adapter, without_adapters


class Around(BaseLayerWithLoRA):
    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer


@pytest.fixture
def model():
    model = nn.ModuleDict({"first": Around(nn.Linear(2, 3)), "second": nn.Sequential(Around(nn.Linear(3, 2)), nn.LayerNorm(2))})
    model.lora_manager = SimpleNamespace(
        modules={"first": model["first"]},
        packed_modules={},
        lora_config=SimpleNamespace(lora_dtype=torch.float32),
        list_adapters=lambda: {2: None},
    )
    return model


def test_files_names_are_the_models_while_weights_are_loaded(model):
    around = list(model.state_dict())
    with pytest.raises(KeyError), without_adapters(model):
        assert list(model.state_dict()) == [name.replace("base_layer.", "") for name in around]
        raise KeyError
    assert list(model.state_dict()) == around
    assert isinstance(model["first"], Around)


def test_adapters_of_layers_that_vllm_has_not_are_refused(model):
    """It would pass them over, and sample from another policy."""
    tensors = {"third.lora_A.weight": torch.ones(1, 2), "third.lora_B.weight": torch.ones(3, 1)}
    with pytest.raises(RefitError, match="third"):
        put_adapter(model, 1, (), tensors, LoraSpec(rank=1), "cpu")


def test_adapters_that_vllm_has_lost_are_missed(model):
    tensors = {"first.lora_A.weight": torch.ones(1, 2), "first.lora_B.weight": torch.ones(3, 1)}
    with pytest.raises(RefitError, match="no adapter 3 in vLLM"):
        put_adapter(model, 1, (2, 3), tensors, LoraSpec(rank=1), "cpu")
