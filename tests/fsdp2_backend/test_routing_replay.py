"""Routing that is replayed under every way to divide a model; the cases are in fsdp2_replay_cases."""

import numpy as np
import pytest
from fsdp2_replay_cases import LAYOUTS, prepare, run_all
from fsdp2_support import make_backend, step_request
from rank_launch import launch_rows
from routing_reference import NUM_EXPERTS, make_mixed_model, routed_batch
from transformers import Qwen3MoeConfig

from rlcore.spi import ROUTED_EXPERTS, CheckContext, CloseRequest, ContractError, ModelSpec
from rlcore_fsdp2.check import check
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What went wrong on each rank."""
    root = tmp_path_factory.mktemp("fsdp2-replay")
    prepare(root)
    return launch_rows(run_all, (root,), [root / f"results-{rank}.json" for rank in range(2)])


@pytest.mark.parametrize("name", [layout.name for layout in LAYOUTS])
def test_layout(results, name):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results) if result[name]}
    assert found == {}, "\n".join(found.values())


def test_experts_are_counted_by_the_familys_own_key(tmp_path, monkeypatch):
    """Not by an attribute of transformers' config, which calls them what it likes."""
    backend, batch = make_backend(make_mixed_model(tmp_path / "model")), routed_batch()
    monkeypatch.setattr(Qwen3MoeConfig, "attribute_map", {})
    experts = batch.token_columns[ROUTED_EXPERTS]
    beyond = batch.with_token_column(ROUTED_EXPERTS, np.where(experts == NUM_EXPERTS - 1, np.int16(NUM_EXPERTS), experts))
    with pytest.raises(ContractError):
        backend.train_step(step_request([beyond], batch.counts()))
    result = backend.train_step(step_request([batch], batch.counts()))
    assert 0 < result.metrics["routing_agreement"] < 1
    backend.close(CloseRequest())


def test_what_would_route_by_itself_all_the_same_is_refused(tmp_path):
    def problems(architecture, **options):
        model = tmp_path / architecture
        if not model.exists():
            make_model(model, architecture)
        context = CheckContext(
            model=ModelSpec(path=str(model)), device="cpu", world_size=1, max_sequence_length=64, replays_routing=True
        )
        return [problem.path for problem in check(context, Fsdp2Config(**options))]

    assert problems("qwen3_moe") == []
    assert problems("qwen3") == ["rollout.replay_routing"]
    assert "trainer.fsdp2.compile_layers" in problems("qwen3_moe", compile_layers=True)
