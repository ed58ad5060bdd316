"""What an engine on a CPU holds, and which parts of one on a GPU are put to sleep and woken."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.engines import residency
from rlcore_vllm.engines.residency import held_bytes, move


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_cpus_engine_holds_its_share_of_the_weights_and_each_cache_once(num_ranks, tmp_path):
    directory = make_model(tmp_path, "qwen3", tied=True)
    cache = torch.zeros(10)
    worker = SimpleNamespace(
        device=torch.device("cpu"),
        model_runner=SimpleNamespace(kv_caches=[cache, cache, torch.zeros(5), []]),
        model_config=SimpleNamespace(
            hf_config=AutoConfig.from_pretrained(directory), trust_remote_code=False, dtype=torch.bfloat16
        ),
        parallel_config=SimpleNamespace(world_size=num_ranks),
    )
    elements = sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    assert held_bytes(worker, in_process=True) == 40 + 20 + 2 * elements // num_ranks


class Executor:
    """Sleeps and wakes as it is told."""

    def __init__(self, asleep):
        self.sleeping_tags = set(asleep)

    def wake_up(self, tags):
        self.sleeping_tags -= set(tags)


@pytest.fixture
def moved(monkeypatch):
    """A function (device, parts asleep, options of move) -> the parts asleep then, and what was dropped and discarded."""
    dropped, discarded = [], []

    def put_to_sleep(executor, tags, discard_weights):
        executor.sleeping_tags = set(tags)
        discarded.append(discard_weights)

    monkeypatch.setattr(residency.versions, "drop_caches", dropped.append)
    monkeypatch.setattr(residency.versions, "put_to_sleep", put_to_sleep)

    def run(device, asleep, **options):
        executor = Executor(asleep)
        config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
        core = SimpleNamespace(engine_core="core")
        move(SimpleNamespace(vllm_config=config, model_executor=executor, engine_core=core), **options)
        return executor.sleeping_tags, dropped, discarded

    return run


ALL, WEIGHTS, CACHE, NONE = {"weights", "kv_cache"}, {"weights"}, {"kv_cache"}, set()


@pytest.mark.parametrize(
    ("before", "weights", "cache", "after", "sleeps"),
    [
        (NONE, False, False, ALL, True),
        (NONE, True, False, CACHE, True),
        (ALL, True, False, CACHE, False),
        (ALL, True, True, NONE, False),
        (CACHE, False, True, WEIGHTS, True),
        (NONE, True, True, NONE, False),
    ],
)
def test_a_gpus_engine_sleeps_in_part(moved, before, weights, cache, after, sleeps):
    found, dropped, discarded = moved("cuda", before, weights=weights, cache=cache, discard_weights=True)
    assert found == after
    assert (dropped, discarded) == ((["core"], [True]) if sleeps else ([], []))


def test_on_a_cpu_nothing_moves(moved):
    assert moved("cpu", NONE, weights=False, cache=False, discard_weights=True) == (NONE, [], [])
