"""Routing that is replayed under every way to divide a model; the cases are in fsdp2_replay_cases."""

import json

import pytest
from fsdp2_replay_cases import LAYOUTS, prepare, run_all
from rank_launch import launch

from rlcore.spi import CheckContext, ModelSpec
from rlcore.testing.models import make_model
from rlcore_fsdp2.check import check
from rlcore_fsdp2.config import Fsdp2Config


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What went wrong on each rank."""
    root = tmp_path_factory.mktemp("fsdp2-replay")
    prepare(root)
    launch(run_all, (root,), 2)
    return [json.loads((root / f"results-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [layout.name for layout in LAYOUTS])
def test_layout(results, name):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results) if result[name]}
    assert found == {}, "\n".join(found.values())


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
