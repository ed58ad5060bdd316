"""A narrow copy of a model that computes for float32 masters."""

import pytest
import torch
from fsdp2_support import exported, make_batch, split, step_request
from torch import nn

from rlcore.spi import ExportWeightsRequest
from rlcore_fsdp2.working_copy import WorkingCopy


@pytest.fixture
def master():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


@pytest.fixture
def copy(master):
    return WorkingCopy(master, nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).bfloat16())


def test_it_is_the_rounded_master_and_follows_it(master, copy):
    for _ in range(2):
        for narrow, wide in zip(copy.model.parameters(), master.parameters(), strict=True):
            assert torch.equal(narrow, wide.bfloat16())
        with torch.no_grad():
            for wide in master.parameters():
                wide.add_(0.01)
        copy.refresh()


def test_gradients_add_up_in_float32_at_the_master(master, copy):
    """In bfloat16 all but the first would be lost: each is below the last place of their sum."""
    inputs, expected = torch.full((1, 4), 2.0**-5).bfloat16(), torch.zeros(6, 4, dtype=torch.float64)
    for scale in (1.0, *[2.0**-9] * 8):
        (copy.model[0](inputs) * scale).sum().backward()
        expected += scale * 2.0**-5
        assert all(narrow.grad is None for narrow in copy.model.parameters())
    assert master[0].weight.grad.dtype == torch.float32
    assert torch.equal(master[0].weight.grad.double(), expected)
    assert master[2].weight.grad is None, "no gradient has reached it"


def test_a_trainer_exports_the_copy_itself(backend):
    """So that a refit in the compute dtype costs no copy; the masters hold more than it."""
    trainer, places = backend(dtype="bfloat16"), []
    for version in range(2):
        batch = make_batch()
        trainer.train_step(step_request(split(batch, [[0, 1, 2], [3, 4, 5]]), batch.counts(), version))
        request = ExportWeightsRequest(weight_version=version + 1, dtype="bfloat16", max_bucket_bytes=2**20)
        export, wide = trainer.export_weights(request), exported(trainer, version + 1)
        assert export.persistent
        narrow = {named.name: named.tensor for bucket in export.buckets for named in bucket.tensors}
        assert narrow.keys() == wide.keys()
        assert all(torch.equal(narrow[name], tensor.bfloat16()) for name, tensor in wide.items())
        assert any((tensor != tensor.bfloat16().float()).any() for tensor in wide.values())
        places.append({name: tensor.data_ptr() for name, tensor in narrow.items()})
    assert places[0] == places[1]
