"""Where memory lives; that CUDA's is freed is checked in test_backend_gpu."""

import pytest
import torch
from fsdp2_support import assert_same, exported, make_batch, step_request

from rlcore.spi import LoadStateRequest, LogprobsRequest, SaveStateRequest, SetResidencyRequest
from rlcore_torchkit.residency import HostCopy, num_bytes


def test_host_copy_empties_the_storages_and_brings_every_alias_back():
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


def test_offloading_twice_keeps_the_first_copy():
    tensor, copy = torch.arange(3.0), HostCopy()
    copy.offload([tensor])
    copy.offload([tensor])
    copy.restore()
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_bytes_on_cpu_are_those_of_weights_reference_and_optimizer(backend):
    trainer = backend(needs_reference=True)
    resident = SetResidencyRequest(weights="device", state="device")
    num_parameter_bytes = sum(tensor.nbytes for tensor in exported(trainer).values())
    assert trainer.set_residency(resident).device_bytes == 2 * num_parameter_bytes
    batch = make_batch()
    trainer.train_step(step_request([batch], batch.counts()))
    num_steps_bytes = 4 * len(exported(trainer, 1))
    assert trainer.set_residency(resident).device_bytes == 4 * num_parameter_bytes + num_steps_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_moved_and_saved_on_the_host_goes_on_unchanged(dtype, backend, tmp_path):
    moved, still = backend(dtype=dtype), backend(dtype=dtype)
    for version in range(2):
        batch = make_batch(seed=version)
        results = [one.train_step(step_request([batch], batch.counts(), version)) for one in (moved, still)]
        assert results[0] == results[1]
        moved.set_residency(SetResidencyRequest(weights="host", state="host"))
    moved.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    assert moved.load_state(LoadStateRequest(directory=tmp_path)).weight_version == 2
    moved.set_residency(SetResidencyRequest(weights="device", state="host"))
    request = LogprobsRequest(microbatches=(batch,), model="policy", temperature=1.0, entropy=False, weight_version=2)
    assert (moved.get_logprobs(request).logprobs[0] == still.get_logprobs(request).logprobs[0]).all()
    moved.set_residency(SetResidencyRequest(weights="device", state="device"))
    results = [one.train_step(step_request([batch], batch.counts(), 2)) for one in (moved, still)]
    assert results[0] == results[1]
    assert_same(exported(moved, 3), exported(still, 3), tolerance=0.0)
