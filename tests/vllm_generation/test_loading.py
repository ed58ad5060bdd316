"""When weights may be copied straight into a model's parameters, and that nothing is left out then."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlcore.spi import RefitError, TensorSpec
from rlcore_torchkit.refit.shard_slices import whole_slice

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from rlcore_vllm.engines.versions import keeps_checkpoint_form
from rlcore_vllm.ranks.loading import Loader

CUDA = torch.device("cuda", 0)
PLAIN = SimpleNamespace(quantization=None, dtype=torch.float32)


class Layer(nn.Module):
    def __init__(self, method):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.quant_method = method


class Model(nn.Module):
    """Two layers as vLLM makes them, which load by copying."""

    def __init__(self, method=None):
        super().__init__()
        self.first, self.second = Layer(UnquantizedEmbeddingMethod()), Layer(method or UnquantizedLinearMethod())
        self.norm = nn.LayerNorm(3)
        record_metadata_for_reloading(self)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


class RepackingMethod(QuantizeMethodBase):
    def create_weights(self, *args, **kwargs): ...

    def apply(self, *args, **kwargs): ...


def experts_method(backend):
    method = object.__new__(UnquantizedFusedMoEMethod)
    nn.Module.__init__(method)
    method.unquantized_backend = SimpleNamespace(name=backend)
    return method


@pytest.mark.parametrize(
    ("method", "keeps"),
    [
        (UnquantizedLinearMethod(), True),
        (UnquantizedEmbeddingMethod(), True),
        (RepackingMethod(), False),
        (experts_method("TRITON"), True),
        (experts_method("BATCHED_TRITON"), True),
        (experts_method("FLASHINFER_CUTLASS"), False),
        (experts_method("FLASHINFER_TRTLLM"), False),
        (experts_method("CPU"), False),
    ],
)
def test_which_methods_leave_weights_as_they_are(method, keeps):
    assert keeps_checkpoint_form(method) is keeps
    assert Loader(Model(method), PLAIN, CUDA).is_direct is keeps


def test_not_on_cpu_and_not_quantised():
    assert not Loader(Model(), PLAIN, torch.device("cpu")).is_direct
    assert not Loader(Model(), SimpleNamespace(quantization="fp8", dtype=torch.float32), CUDA).is_direct


def transposed(model):
    model.first.weight.data = torch.zeros(3, 4).T


def emptied(model):
    model.second.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def narrowed(model):
    model.second.weight.data = model.second.weight.data.bfloat16()


def derived(model):
    """As MLA does, which multiplies weights with each other once they are loaded."""
    model.norm.process_weights_after_loading = lambda dtype: None


@pytest.mark.parametrize("change", [transposed, emptied, narrowed, derived])
def test_not_where_loading_changed_a_parameter(change):
    model = Model()
    assert Loader(model, PLAIN, CUDA).is_direct
    change(model)
    assert not Loader(model, PLAIN, CUDA).is_direct


def test_straight_loading_is_complete_or_refused():
    model = Model()
    loader = Loader(model, PLAIN, CUDA)
    weights = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    loader.begin()
    for item in weights.items():
        loader.load([item], stable=False)
    loader.finish()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    for left_out in ("second.weight", "norm.bias"):
        loader.begin()
        loader.load([item for item in weights.items() if item[0] != left_out], stable=False)
        with pytest.raises(RefitError, match=rf"1 tensor\(s\) .* {left_out}"):
            loader.finish()


def zeroing(model):
    """Its loader sets one tensor to zero once it is loaded, as gpt-oss's does before."""
    load, given = model.load_weights, []

    def load_weights(weights):
        weights = list(weights)
        loaded = load(weights)
        given.append({name: tensor.data_ptr() for name, tensor in weights})
        [tensor.zero_() for name, tensor in weights if name == "norm.bias"]
        return loaded

    model.load_weights = load_weights
    return given


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")], ids=["straight", "layerwise"])
def test_what_came_stays_as_it_is_and_is_copied_no_more_than_that_needs(device):
    model = Model()
    given = zeroing(model)
    loader = Loader(model, PLAIN, device)
    weights = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    for _ in range(2):
        loader.begin()
        loader.load(weights.items(), stable=True)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
        loader.abandon()
    of_loaders = given[-1]
    assert of_loaders["norm.bias"] != weights["norm.bias"].data_ptr()
    assert all(of_loaders[name] == weights[name].data_ptr() for name in of_loaders if name != "norm.bias")


def test_tensors_made_in_inference_mode_are_loaded_again_and_again():
    model = Model()
    loader = Loader(model, PLAIN, CUDA)
    for version in (1.0, 2.0):
        with torch.inference_mode():
            weights = {name: torch.full_like(parameter, version) for name, parameter in model.named_parameters()}
        loader.begin()
        loader.load(weights.items(), stable=True)
        loader.finish()
        assert all((parameter == version).all() for parameter in model.parameters())


def test_backends_of_attention_are_told_of_weights_that_were_loaded_straight():
    model = Model()
    model.attention = object.__new__(Attention)
    nn.Module.__init__(model.attention)
    told = []
    model.attention.impl = SimpleNamespace(process_weights_after_loading=told.append)
    loader = Loader(model, PLAIN, CUDA)
    assert loader.is_direct
    for count in (1, 2):
        loader.begin()
        loader.load(list(model.named_parameters()), stable=True)
        loader.finish()
        assert told == [torch.float32] * count


SPEC = TensorSpec(name="second.weight", shape=(4, 3), dtype="float32")


def test_what_was_loaded_straight_is_what_is_needed():
    model = Model()
    loader = Loader(model, PLAIN, CUDA)
    loader.begin()
    assert loader.needs([SPEC]) == {}
    loader.load([(SPEC.name, torch.ones(SPEC.shape))], stable=False)
    assert loader.needs([SPEC]) == {SPEC.name: [whole_slice(SPEC)]}
    loader.is_direct = False
    assert loader.needs([SPEC]) == {}


def test_a_part_of_a_tensor_is_not_given_to_a_loader():
    model = Model()
    loader = Loader(model, PLAIN, CUDA)
    loader.begin()
    item = SPEC.name, torch.ones(SPEC.shape)
    with pytest.raises(RefitError, match=r"1 tensor\(s\) came in part.*second.weight"):
        loader.load([item], stable=False, partial={SPEC.name})
    assert not model.second.weight.any()
    loader.load([item], stable=False)
    loader.load([item], stable=False, partial={SPEC.name})
