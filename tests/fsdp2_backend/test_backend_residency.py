"""Where memory lives; that CUDA's is freed is checked in test_backend_gpu."""

import pytest
from fsdp2_support import assert_same, exported, make_batch, step_request

from rlcore.spi import LoadStateRequest, LogprobsRequest, SaveStateRequest, SetResidencyRequest


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
