"""An ended engine's memory is freed."""

import functools
import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from rlcore_vllm.engines import cleanup


@pytest.mark.parametrize("as_kept", [lambda *pair: pair, lambda *pair: [pair]], ids=["one pool", "a list of pools"])
def test_allocators_outlive_their_engine(as_kept, monkeypatch):
    kept = []
    monkeypatch.setattr(cleanup, "kept_allocators", kept)
    cleanup.keep_allocators()  # nothing has made one
    assert kept == []
    pools = {"weights": as_kept("pool", "allocator"), "kv_cache": as_kept("pool", "another")}
    instance = SimpleNamespace(allocator_and_pools=pools)
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    cleanup.keep_allocators()
    assert kept == ["allocator", "another"]


@pytest.mark.parametrize(
    ("module", "record"),
    [
        ("vllm.model_executor.model_loader.reload.layerwise", "LAYERWISE_INFO"),
        ("vllm.model_executor.models.interfaces", "_language_model_by_module"),
    ],
)
def test_vllms_records_of_modules_are_cleared(module, record):
    record = getattr(pytest.importorskip(module), record)
    layer = torch.nn.Linear(1, 1)
    record[layer] = layer
    cleanup.forget_layers()
    assert len(record) == 0


def test_a_compiled_model_is_let_go():
    """By torch's own register of hooks; the host's hooks stay."""
    from torch._dynamo import convert_frame
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    model = TorchCompileWithNoGuardsWrapper.__new__(TorchCompileWithNoGuardsWrapper)
    gone = weakref.ref(model)
    own = convert_frame.register_bytecode_hook(lambda old, new: None)
    try:
        convert_frame.register_bytecode_hook(model.bytecode_hook)
        del model
        assert gone() is not None
        cleanup.forget_compiled()
        assert gone() is None
        assert own.id in convert_frame._bytecode_hooks
    finally:
        own.remove()


def test_methods_that_cache_let_their_module_go(monkeypatch):
    """The vision tower of Qwen2.5-VL has such methods: their keys hold the module that they were called on."""

    class Tower(torch.nn.Module):
        @functools.lru_cache  # noqa: B019 - as vLLM's
        def positions(self, size):
            return size

    name = "vllm.model_executor.models.invented"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(Tower=Tower))
    tower = Tower()
    tower.positions(3)
    gone = weakref.ref(tower)
    del tower
    assert gone() is not None
    cleanup.forget_layers()
    gc.collect()
    assert gone() is None
