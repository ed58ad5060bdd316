"""Memory that is discarded or copied to the host, and comes back."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from rlcore.spi import SetResidencyRequest
from rlcore_torchkit.distributed import residency
from rlcore_torchkit.distributed.residency import BLOCK_BYTES, Discarded, HostCopy, Residency, num_bytes, reserved_bytes


def test_discarded_memory_comes_back_as_zeros_underneath_its_views() -> None:
    whole = torch.ones(8)
    half, discarded = whole[4:], Discarded()
    for _ in range(2):
        discarded.discard([whole, half])
        discarded.discard([half])
        assert num_bytes([whole, half]) == 0
        discarded.restore()
        half += 1.0
        assert whole.tolist() == [0.0] * 4 + [1.0] * 4


def test_host_copy_empties_the_storages_and_brings_every_alias_back() -> None:
    whole = torch.arange(12.0)
    view, other = whole[4:8].view(2, 2), torch.ones(3, requires_grad=True)
    expected = [tensor.detach().clone() for tensor in (whole, view, other)]
    copy = HostCopy()
    for _ in range(2):
        copy.offload([whole, view, other])
        assert num_bytes([whole, view, other]) == 0
        copy.restore()
        assert num_bytes([whole, view, other]) == (12 + 3) * 4
        assert all(torch.equal(found, right) for found, right in zip((whole, view, other), expected, strict=True))
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@given(sizes=st.lists(st.lists(st.integers(0, 40), max_size=8), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_storages_share_blocks_of_host_memory_which_are_kept(sizes: list[list[int]]) -> None:
    """A storage may lie in several blocks. What the next copies need is what the largest has needed, and no more."""
    asked: list[int] = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if function is torch.empty and arguments[0]:
                asked.append(arguments[0])
            return function(*arguments, **(options or {}))

    copy = HostCopy()
    with pytest.MonkeyPatch.context() as patch, Counting():
        patch.setattr(residency, "BLOCK_BYTES", 16)
        patch.setattr(residency, "ALIGNED_BYTES", 4)
        for round_sizes in sizes:
            tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in round_sizes]
            expected = [tensor.clone() for tensor in tensors]
            copy.offload(tensors[:2])
            copy.offload(tensors)
            assert num_bytes(tensors) == 0
            copy.restore()
            assert all(torch.equal(found, right) for found, right in zip(tensors, expected, strict=True))
    most = max(sum(size + -size % 4 for size in round_sizes) for round_sizes in sizes)
    assert asked == [16] * -(-most // 16)


def test_offloading_twice_keeps_the_first_copy() -> None:
    tensor, copy = torch.arange(3.0), HostCopy()
    copy.offload([tensor])
    copy.offload([tensor])
    copy.restore()
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_nothing_is_freed_where_the_host_has_no_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written afterwards stays: no copy from before comes back over it."""
    monkeypatch.setattr(residency, "BLOCK_BYTES", 16)
    monkeypatch.setattr(residency, "ALIGNED_BYTES", 4)
    before, tensors, copy = torch.ones(16, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8).split(10), HostCopy()
    tensors = tuple(tensor.clone() for tensor in tensors)
    copy.offload([before])
    room = 2

    class Full(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if function is torch.empty and arguments == (16,):
                nonlocal room
                room -= 1
                if room < 0:
                    raise MemoryError("no room")
            return function(*arguments, **(options or {}))

    with Full(), pytest.raises(MemoryError, match="no room"):
        copy.offload(tensors)
    assert num_bytes(tensors) == 50
    for tensor in tensors:
        tensor += 100
    copy.offload(tensors[3:])
    assert num_bytes([before, *tensors]) == 30
    copy.restore()
    assert torch.cat(tensors).tolist() == list(range(100, 150))
    assert before.tolist() == [1] * 16


def test_where_one_block_is_refused_no_more_are_asked_for_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "BLOCK_BYTES", 16)
    registered: set[int] = set()
    asked: list[int] = []

    def register(address: int, size: int, flags: int) -> int:
        asked.append(address)
        time.sleep(0.001)
        if len(asked) > 3:
            return 2
        registered.add(address)
        return 0

    def check(code: int) -> None:
        if code:
            raise RuntimeError("CUDA error: out of memory")

    cuda = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.discard)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        residency.host_blocks(300, pinned=True)
    assert len(asked) < 100
    assert registered == set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_device_come_back_from_pinned_blocks() -> None:
    copy, device = HostCopy(), torch.device("cuda", 0)
    tensors = [torch.randint(256, (size,), dtype=torch.uint8, device=device) for size in (BLOCK_BYTES + 5, 3, 3 * BLOCK_BYTES)]
    expected = [tensor.cpu() for tensor in tensors]
    for _ in range(2):
        before = torch.cuda.memory_allocated(device)
        copy.offload(tensors)
        assert before - torch.cuda.memory_allocated(device) >= 4 * BLOCK_BYTES
        copy.restore()
        assert all(torch.equal(found.cpu(), right) for found, right in zip(tensors, expected, strict=True))
    made = residency.host_blocks(2, pinned=True)
    assert [block.is_pinned() for block in made] == [True, True]
    addresses = [block.data_ptr() for block in made]
    del made
    for address in addresses:  # which are let go of: to do so again is an error
        assert int(torch.cuda.cudart().cudaHostUnregister(address)) != 0
    with pytest.raises(torch.AcceleratorError):  # CUDA keeps the error for the next call
        torch.zeros(1, device=device)


def test_what_the_allocator_keeps_is_counted_used_or_not_without_pools_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"device": 1, "total_size": 8, "allocated_size": 5, "segment_pool_id": (0, 0)},
        {"device": 1, "total_size": 2, "allocated_size": 0, "segment_pool_id": (0, 0)},
        {"device": 1, "total_size": 32, "allocated_size": 32, "segment_pool_id": (0, 1)},
        {"device": 0, "total_size": 64, "allocated_size": 64, "segment_pool_id": (0, 0)},
    ]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert [reserved_bytes(torch.device(name)) for name in ("cuda:1", "cuda", "cpu")] == [10, 64, None]


def test_an_allocator_that_knows_no_segments_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own raises where it is."""

    def refuse() -> None:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuse)
    assert reserved_bytes(torch.device("cuda:0")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_what_torch_has_reserved_where_there_is_one_pool() -> None:
    device = torch.device("cuda", 0)
    kept = torch.ones(1 << 22, device=device)
    assert reserved_bytes(device) == torch.cuda.memory_reserved(device) >= kept.nbytes


@pytest.mark.parametrize(("weights", "moves"), [("device", []), ("host", ["device", "host"])])
def test_what_is_on_the_device_is_not_moved_to_be_read(weights: Any, moves: list[str]) -> None:
    """Scratch would lose its content: the gradients between the pieces of a step."""
    memory = Residency(torch.device("cpu"))
    found: list[str] = []
    memory.last_request = SetResidencyRequest(weights=weights, state=weights)
    with memory.resident(lambda request: found.append(request.weights)):
        pass
    assert found == moves
