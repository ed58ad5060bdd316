"""Memory that is discarded or copied to the host, and comes back."""

import torch

from rlcore_torchkit.residency import Discarded, HostCopy, num_bytes


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


def test_offloading_twice_keeps_the_first_copy() -> None:
    tensor, copy = torch.arange(3.0), HostCopy()
    copy.offload([tensor])
    copy.offload([tensor])
    copy.restore()
    assert tensor.tolist() == [0.0, 1.0, 2.0]
