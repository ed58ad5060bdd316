"""Corrections of layers without an engine; test_families holds whole models against transformers."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.models.transformers.base import Base

from rlcore.spi import ContractError
from rlcore_vllm.engines.model_classes import keep_transformers_classes
from rlcore_vllm.ranks.exact_layers import CORRECTIONS, compute_as_transformers


class XIELU(torch.nn.Module):
    """A layer of the name that a correction is for."""

    def __init__(self):
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        self.alpha.weight_loader = partial(print)


@pytest.mark.parametrize(("window", "expected"), [(7, 6), ((6, 0), (5, 0))])
@pytest.mark.parametrize("name", ["CohereAttention", "Cohere2MoeAttention"])
def test_a_window_is_shortened_only_where_vllm_lengthens_it(name, window, expected):
    impl = SimpleNamespace(sliding_window=window)
    layer = SimpleNamespace(sliding_window=7, config=SimpleNamespace(sliding_window=6), attn=SimpleNamespace(impl=impl))
    CORRECTIONS[name](layer)
    assert impl.sliding_window == expected
    layer.sliding_window = 6
    CORRECTIONS[name](layer)
    layer.sliding_window = None
    CORRECTIONS[name](layer)
    assert impl.sliding_window == expected


def test_a_model_is_corrected_as_it_is_built(monkeypatch):
    monkeypatch.setattr(base_loader, "initialize_model", lambda **_: torch.nn.Sequential(XIELU()))
    compute_as_transformers()
    compute_as_transformers()
    (layer,) = base_loader.initialize_model(vllm_config=None)
    assert layer.alpha.dtype == torch.get_default_dtype()
    assert layer.alpha.weight_loader.__name__ == "print"


def test_classes_of_transformers_stay_as_they_are_or_the_engine_is_refused(monkeypatch):
    own = "_decorate_cls_for_torch_compile"
    monkeypatch.setattr(Base, own, getattr(Base, own))

    class Model(torch.nn.Module):
        pass

    before = dict(vars(Model))
    keep_transformers_classes(eager=True)
    arguments = {"cls": Model, "dynamic_arg_dims": None, "enable_if": bool, "is_encoder": False}
    getattr(Base, own)(None, **arguments)
    assert dict(vars(Model)) == before
    keep_transformers_classes(eager=False)
    with pytest.raises(ContractError, match="enforce_eager"):
        getattr(Base, own)(None, **arguments)
