"""Hosts that join a run and leave it, by their end or since no packet comes through: the metrics stay."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from rlcore_torchkit.testing.models import make_model

from ..system.system_support import DIGITS
from .hosts import DataCentre
from .ray_cluster import await_joined, give_token, start_head, start_node, start_ray
from .runs import SMALL, TWO_HOSTS, Run, assert_nothing_is_left, assert_same_metrics, started, trained

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1500)]
ENGINES = ("generator.name=vllm", "generator.vllm.cpu_kv_cache_gib=0.1", "model.path=wide")
STEPS = (*SMALL, "training.prompts_per_step=64", "run.num_steps=150", "checkpoint.every_n_steps=50")
ELASTIC = ("cluster.gpus_per_node=1", "cluster.address=auto", "cluster.elastic={max = 1, gpus = 2}")
"""The first host has two processors, of which the rank takes one: the engine has room on the second host alone."""
JOIN_S = 300.0


@pytest.fixture(scope="module")
def fixed(centre: DataCentre) -> Path:
    """The same training in one process on a host."""
    # The engine's attention on CPU takes heads of at least 32.
    make_model(centre.shared / "wide", "qwen3", alphabet=DIGITS, hidden_size=64, num_heads=2, max_length=64)
    return trained(centre.hosts[1], "fixed", *STEPS, *ENGINES)


def end_ray(centre: DataCentre, _: ExitStack) -> None:
    """Kill what Ray runs on the second host."""
    for process in centre.hosts[2].processes():
        with suppress(psutil.Error):
            process.kill()


def cut(centre: DataCentre, stack: ExitStack) -> None:
    """Let no packet through to the second host."""
    stack.enter_context(centre.network.cut(2))


def await_text(run: Run, words: str) -> None:
    """Wait until a run has shown these words."""
    deadline = time.monotonic() + JOIN_S
    while words not in run.said():
        assert run.process.poll() is None, run.said()
        assert time.monotonic() < deadline, run.said()
        time.sleep(0.1)


@pytest.mark.parametrize("leave", [end_ray, cut])
def test_an_engine_of_another_host_joins_and_leaves(
    centre: DataCentre, fixed: Path, leave: Callable[[DataCentre, ExitStack], None]
) -> None:
    centre.put_right()
    first, second = centre.hosts[1], centre.hosts[2]
    for host in centre.hosts.values():
        give_token(host)
    start_head(first)
    with ExitStack() as stack, started(first, leave.__name__, *STEPS, *ENGINES, *ELASTIC) as run:
        run.await_step(1)
        await_joined(start_node(second, first))
        await_text(run, "takes part")
        assert run.process.poll() is None
        leave(centre, stack)
        assert run.end() == 0, run.said()
        assert f"node {second.address}" in run.said()
    assert_same_metrics(run.directory, fixed)
    assert_nothing_is_left(centre)


def test_trainers_go_on_with_the_host_that_is_left(centre: DataCentre) -> None:
    """The sums over one rank are those over two, from the newest checkpoint on."""
    centre.put_right()
    steps = (*SMALL, "run.num_steps=12")
    expected = trained(centre.hosts[1], "one-host", *steps)
    start_ray(centre)
    with ExitStack() as stack, started(centre.hosts[1], "smaller", *steps, *TWO_HOSTS, "cluster.min_nodes=1") as run:
        run.await_step(3)
        end_ray(centre, stack)
        assert run.end() == 0, run.said()
        assert "with 1 of 2 nodes" in run.said()
    assert_same_metrics(run.directory, expected)
    assert_nothing_is_left(centre)
