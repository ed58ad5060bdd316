"""Which ranks and devices have generators."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import Registry
from rlcore.run.plan.channel import (
    generator_devices,
    ranks_per_generator,
    separate,
    sharing_problems,
)
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import PluginError, capabilities
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.providers import FAKE_GENERATOR, FAKE_TRAINER

Prepare = Callable[..., RunPlan]
NODES = ("cluster.nodes=2", "cluster.gpus_per_node=4")
SEPARATE = (*NODES, 'cluster.placement="separate"', "cluster.generator_gpus_per_node=1", "run.device=cpu")


@frozen(kw_only=True)
class Spanning:
    """Options of a generator that needs several devices."""

    devices: int = 2
    """How many."""


def registry(num_devices: Callable[[Any], Any] = lambda config: config.devices) -> Registry:
    """The fakes, with a trainer of several ranks and a generator of several devices."""
    trainer = evolve(FAKE_TRAINER, capabilities=FAKE_TRAINER.capabilities | {capabilities.MULTI_RANK, "refit.directory"})
    generator = evolve(
        FAKE_GENERATOR,
        config=Spanning,
        num_devices=num_devices,
        capabilities=FAKE_GENERATOR.capabilities | {"refit.directory"},
    )
    others = tuple(entry for entry in fake_registry().entries if entry.role in ("algorithm", "environment", "execution"))
    ours = Registry.from_providers({"trainer": [trainer], "generator": [generator]}).entries
    return evolve(fake_registry(), entries=(*others, *ours))


@pytest.fixture
def plan(prepared: Prepare) -> Prepare:
    """Prepare with such a generator."""
    return lambda *overrides, **options: prepared(*overrides, registry=registry(**options))


def test_in_one_process_a_generator_is_wherever_the_trainer_is(plan: Prepare) -> None:
    found = plan()
    assert (found.ranks_per_generator, separate(found.recipe)) == (1, False)
    assert generator_devices(found.recipe, "cuda", 1) is None


def test_neighbouring_ranks_share_a_generator_that_spans_them(plan: Prepare) -> None:
    found = plan(*NODES)
    assert found.ranks_per_generator == 2
    assert [found.recipe.cluster.hosts_generator(rank, 2) for rank in range(8)] == [True, False] * 4
    assert [generator_devices(found.recipe, "cuda", 2, rank) for rank in (0, 2)] == [(0, 1), (2, 3)]
    assert generator_devices(found.recipe, "cuda", 1, 2) is None
    assert generator_devices(found.recipe, "cpu", 2, 2) is None


def test_devices_that_only_generate_are_the_last_of_each_node(plan: Prepare) -> None:
    found = plan(*SEPARATE)
    assert found.ranks_per_generator == 1, "it spans none of the trainer's"
    assert separate(found.recipe)
    assert [found.recipe.cluster.hosts_generator(rank, 1) for rank in range(6)] == [True, False, False] * 2
    assert generator_devices(found.recipe, "cuda", 1, 2) == (3,)


def test_ranks_that_cannot_be_divided_are_a_problem_of_the_cluster(plan: Prepare) -> None:
    recipe = plan(*NODES).recipe
    (problem,) = sharing_problems(recipe, 3)
    assert problem.path == "cluster.gpus_per_node"
    assert problem.found.startswith("4,")
    assert problem.expected == "a multiple of 3"
    assert not [*sharing_problems(recipe, 2), *sharing_problems(plan().recipe, 3), *sharing_problems(plan(*SEPARATE).recipe, 2)]


def test_less_than_one_device_is_one(plan: Prepare) -> None:
    assert plan(*NODES, "generator.fake.devices=0").ranks_per_generator == 1


def test_a_function_that_raises_is_the_plugins(plan: Prepare) -> None:
    with pytest.raises(PluginError, match="its function `num_devices` raised ZeroDivisionError"):
        plan(*NODES, num_devices=lambda _: 1 // 0)

    def interrupted(_: Any) -> int:
        raise KeyboardInterrupt

    with pytest.raises(PluginError, match="num_devices of .* raised KeyboardInterrupt"):
        plan(*NODES, num_devices=interrupted)


def test_where_nothing_generates_nothing_is_spanned(plan: Prepare) -> None:
    found = plan(*NODES)
    assert ranks_per_generator(found.recipe, {"trainer": found.chosen["trainer"]}) == 1
