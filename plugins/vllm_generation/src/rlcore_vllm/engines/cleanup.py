"""Frees what vLLM and torch keep of an engine that has ended, by their internal names."""

import sys
from collections.abc import Iterator
from inspect import isclass
from typing import Any

kept_allocators: list[Any] = []
"""Allocators of engines that are closed, kept for what torch frees later."""


def keep_allocators() -> None:
    """Keep the allocators of vLLM's memory pools beyond an engine's end: torch calls them for tensors that are freed later."""
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    if cumem is not None and cumem.CuMemAllocator.instance is not None:
        for entries in cumem.CuMemAllocator.instance.allocator_and_pools.values():  # a list for each tag from 0.32 on
            kept_allocators.extend(allocator for _, allocator in (entries if isinstance(entries, list) else [entries]))


def forget_layers() -> None:
    """Clear vLLM's records of modules after an engine's end: they would keep the weights and the cache."""
    for module, modules in {
        "vllm.model_executor.model_loader.reload.layerwise": "LAYERWISE_INFO",
        "vllm.model_executor.models.interfaces": "_language_model_by_module",  # refers to a model of images until 0.26
    }.items():
        getattr(sys.modules.get(module), modules, {}).clear()
    for method in _cached_methods("vllm.model_executor.models."):
        method.cache_clear()  # its keys hold the module, such as the vision tower of Qwen2.5-VL


def _cached_methods(package: str) -> Iterator[Any]:
    """The methods under functools.cache and functools.lru_cache of all classes in the imported modules of a package."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for kind in filter(isclass, list(vars(module).values())):
                yield from (method for method in vars(kind).values() if hasattr(method, "cache_clear"))


def forget_compiled() -> None:
    """After an engine has ended: the hooks by which torch.compile hands vLLM the code of a compiled model refer to the model,
    so that its weights and its cache would never be freed."""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is None:
        return
    hooks = convert_frame._bytecode_hooks
    for number in [number for number, hook in hooks.items() if hook.__module__ == "vllm.compilation.wrapper"]:
        del hooks[number]
