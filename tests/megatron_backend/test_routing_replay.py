"""Routing that is replayed under every way to divide a model; the cases are in megatron_replay_cases."""

import numpy as np
import pytest
from megatron_replay_cases import CASES, NAME, prepare, run_all
from megatron_support import make_backend, step_request
from rank_launch import launch_rows
from routing_reference import routed_batch

from rlcore.spi import ROUTED_EXPERTS, CloseRequest, ContractError


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("megatron-replay")
    prepare(directory)
    return directory


@pytest.fixture(scope="module")
def results(root):
    """What went wrong on each rank."""
    return launch_rows(run_all, (root,), [root / f"results-{rank}.json" for rank in range(2)])


@pytest.mark.parametrize("name", [case.layout.name for case in CASES])
def test_layout(results, name):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results) if result[name]}
    assert found == {}, "\n".join(found.values())


def test_a_routing_of_another_model_is_refused(root):
    batch = routed_batch()
    experts = batch.token_columns[ROUTED_EXPERTS]
    backend = make_backend(root / "models" / NAME)
    wrong = {
        r"\[\d+, 3, 2\] with experts up to 3": experts[:, :3],
        r"\[\d+, 4, 1\] with experts up to 3": experts[..., :1],
        r"\[\d+, 4, 2\] with experts up to 4": np.where(experts == 3, np.int16(4), experts),
    }
    for message, column in wrong.items():
        with pytest.raises(ContractError, match=message):
            backend.train_step(step_request([batch.with_token_column(ROUTED_EXPERTS, column)], batch.counts()))
    plain = batch.with_token_column("advantages", batch.token_columns["advantages"])
    without = {name: column for name, column in plain.token_columns.items() if name != ROUTED_EXPERTS}
    bare = type(batch)(tokens=batch.tokens, offsets=batch.offsets, loss_mask=batch.loss_mask, token_columns=without)
    with pytest.raises(ContractError, match="1 of 2 microbatches"):
        backend.train_step(step_request([batch, bare], batch.counts()))
    backend.close(CloseRequest())
