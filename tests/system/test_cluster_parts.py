"""A run in which two ranks of an engine on devices of its own are sent what each reads, as on GPUs."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session

from .system_support import Workplace  # type: ignore[import-not-found]
from .test_cluster import assert_close, math  # type: ignore[import-not-found]  # noqa: F401

PLAIN_WEIGHTS = (Path(__file__).parent / "plain_weights", Path(__file__).parents[1] / "vllm_generation")
"""Where Python finds what has engines on a CPU keep weights as engines on GPUs do."""


@pytest.fixture(scope="module")
def ray_of_plain_weights() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, PLAIN_WEIGHTS)), prepend=os.pathsep)
        with ray_session(RayConfig(gpus_per_node=3, object_store_mib=100), "cpu", None):
            yield


@pytest.mark.wide
@pytest.mark.usefixtures("ray_of_plain_weights")
def test_two_ranks_of_an_engine_are_sent_what_each_reads(workplace: Workplace, math: tuple[Path, Path]) -> None:  # noqa: F811
    """Once the first refit has shown it; all figures are those of a run in one process, with whole tensors."""
    recipe, alone = math
    places = ("cluster.gpus_per_node=3", "cluster.placement=separate", "cluster.generator_gpus_per_node=2")
    run = workplace.train(str(recipe), "run.name=as-read", *places, "generator.vllm.tensor_parallel=2", "refit.channel=shards")
    [log] = (run / "logs").glob("**/vllm-*.log")
    found = re.findall(r"rank ([01]) has received (\d+) bytes", log.read_text())
    received = [[int(num_bytes) for rank, num_bytes in found if rank == each] for each in "01"]
    for first, *others in received:
        assert len(others) >= 2
        assert {*others} == {others[0]}
        assert 0.4 < others[0] / first < 0.7
    assert_close(run, alone)
