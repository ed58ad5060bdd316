"""Freeing an engine's memory on the device and taking it back, and measuring what it holds."""

import os
from typing import Any

import torch

from rlcore_vllm.engines import versions


def move(llm: Any, *, weights: bool, cache: bool, discard_weights: bool) -> None:
    """Bring weights and KV cache to the device (True) or off it. On CPU both places are one and nothing moves.

    The cache is never kept; weights are copied to the host unless they may be discarded.
    """
    if llm.vllm_config.device_config.device_type == "cpu":
        return
    executor = llm.model_executor
    asleep = set(executor.sleeping_tags)
    wanted = {tag for tag, resident in (("weights", weights), ("kv_cache", cache)) if not resident}
    if wanted - asleep:
        versions.drop_caches(llm.engine_core.engine_core)
        versions.put_to_sleep(executor, wanted, discard_weights)
        asleep = set(executor.sleeping_tags)
    if asleep - wanted:
        executor.wake_up(sorted(asleep - wanted))


def held_bytes(worker: Any, in_process: bool) -> int:
    """Return the bytes that a worker holds: on CUDA all that its process has on the device, but weights and KV cache alone
    where that is the trainer's process too; on CPU weights and KV cache."""
    if worker.device.type == "cuda":
        own = None if in_process else _process_bytes(worker.device)
        return _allocated_bytes(in_process) if own is None else own
    caches = {cache.data_ptr(): cache.nbytes for cache in worker.model_runner.kv_caches if isinstance(cache, torch.Tensor)}
    return sum(caches.values()) + _weight_bytes(worker)


def _weight_bytes(worker: Any) -> int:
    """Bytes by the model's shapes: on CPU, linear layers keep their weights packed, outside of their parameters."""
    from rlcore_vllm.channels.manifest import expected_shapes

    config = worker.model_config
    shapes = expected_shapes(config.hf_config, config.trust_remote_code).values()
    return sum(torch.Size(shape).numel() for shape in shapes) * config.dtype.itemsize // worker.parallel_config.world_size


def _allocated_bytes(in_process: bool) -> int:
    """Bytes by the allocators: vLLM's, and torch's where it is the engine's alone."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocations = get_mem_allocator_instance().pointer_to_data.values()
    asleep = sum(data.handle[1] for data in allocations if data.is_asleep)
    total = sum(data.handle[1] for data in allocations) if in_process else torch.cuda.memory_reserved()
    return int(total - asleep)


def _process_bytes(device: torch.device) -> int | None:
    """Bytes of this process by the driver; None where it does not say, as in some containers."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return own[0] if own else None
