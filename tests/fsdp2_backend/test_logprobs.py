"""get_logprobs against plain transformers, policy and reference."""

import numpy as np
import pytest
import torch
from fsdp2_support import TEMPERATURE, Reference, make_batch, split, step_request

from rlcore.spi import ContractError, LogprobsRequest
from rlcore_torchkit.architectures.registry import installed_model_types

ARCHITECTURES = installed_model_types()


def request(microbatches, **changes):
    options = {"model": "policy", "temperature": TEMPERATURE, "entropy": True, "weight_version": 0}
    return LogprobsRequest(microbatches=microbatches, **(options | changes))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_and_entropy_equal_plain_transformers(architecture, model_directory, backend):
    directory, batch = model_directory(architecture), make_batch()
    with torch.no_grad():
        expected = [values.numpy() for values in Reference(directory).logprobs(batch)]
    result = backend(directory).get_logprobs(request(split(batch, [[0, 1], [2], [3, 4, 5]])))
    for found, right in zip((result.logprobs, result.entropy), expected, strict=True):
        assert [part.dtype for part in found] == [np.float32] * 3
        np.testing.assert_allclose(np.concatenate(found), right, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_stays_the_initial_policy(dtype, backend):
    trainer, batch = backend(dtype=dtype, needs_reference=True), make_batch()
    before = trainer.get_logprobs(request((batch,), entropy=False))
    assert before.entropy is None
    trainer.train_step(step_request([batch], batch.counts()))
    reference = trainer.get_logprobs(request((batch,), model="reference", weight_version=1))
    policy = trainer.get_logprobs(request((batch,), weight_version=1))
    assert (reference.logprobs[0] == before.logprobs[0]).all()
    assert (policy.logprobs[0] != before.logprobs[0]).any()


def test_reference_that_was_not_asked_for_is_a_contract_error(backend):
    with pytest.raises(ContractError, match="found no reference policy"):
        backend().get_logprobs(request((make_batch(),), model="reference"))


def test_no_microbatch_gives_no_result(backend):
    assert backend().get_logprobs(request((), entropy=False)).logprobs == ()
