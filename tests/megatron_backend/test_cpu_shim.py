"""What asks for CUDA by name gets the CPU inside, and everything is as it was outside."""

import threading
from types import FunctionType

import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import geglu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlcore.gpu import has_gpu
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu


def attributes() -> list[object]:
    names = ("current_device", "synchronize", "Stream", "Event", "current_stream", "get_rng_state", "manual_seed")
    return [*(getattr(torch.cuda, name) for name in names), *vars(DistributedOptimizer).values()]


@pytest.mark.skipif(has_gpu(), reason="on a GPU fused functions are compiled")
def test_without_a_gpu_fused_functions_stay_as_they_are() -> None:
    assert isinstance(geglu, FunctionType)
    assert geglu.__module__ == "megatron.core.fusions.fused_bias_geglu"
    assert geglu.__code__.co_name == "geglu"  # and not that of what torch.compile returns


def test_tensors_for_cuda_are_made_on_the_cpu_and_stay_there() -> None:
    with cuda_or_cpu("cpu"):
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device="cuda:3", pin_memory=True).device.type == "cpu"
        tensor = torch.ones(2, dtype=torch.bfloat16)
        assert tensor.cuda() is tensor
        assert tensor.pin_memory() is tensor
        assert tensor.type() == "torch.cuda.BFloat16Tensor"
        assert tensor.type(torch.float32).dtype == torch.float32
        assert torch.cuda.current_device() == torch.device("cpu")


def test_streams_and_events_take_part_and_wait_for_nothing() -> None:
    with cuda_or_cpu("cpu"):
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            stream.wait_event(event.record())
        torch.cuda.current_stream().wait_stream(stream).synchronize()
        torch.cuda.synchronize()


def test_cudas_random_state_is_that_of_the_cpu() -> None:
    with cuda_or_cpu("cpu"), torch.random.fork_rng(devices=[]):
        torch.cuda.manual_seed(5)
        state, first = torch.cuda.get_rng_state(), torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), first)


def test_everything_is_put_back_whatever_ends_it() -> None:
    before = attributes()
    with cuda_or_cpu("cpu"), cuda_or_cpu("cpu"):
        assert attributes() != before
    assert attributes() == before
    with pytest.raises(ZeroDivisionError), cuda_or_cpu("cpu"):
        raise ZeroDivisionError
    assert attributes() == before
    assert torch.ones(2).type() == "torch.FloatTensor"


def test_other_threads_make_their_tensors_where_they_say() -> None:
    devices = []
    with cuda_or_cpu("cpu"):
        thread = threading.Thread(target=lambda: devices.append(torch.zeros(2, device="meta").device.type))
        thread.start()
        thread.join()
    assert devices == ["meta"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_with_a_gpu_nothing_is_redirected() -> None:
    with cuda_or_cpu():
        assert torch.zeros(2, device="cuda").is_cuda
