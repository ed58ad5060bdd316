"""Places generators on ranks and devices."""

from collections.abc import Iterator, Mapping
from typing import Literal

from rlcore.config.convert import selected_options
from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import Entry
from rlcore.registry.provider_calls import num_devices
from rlcore.spi import Problem, Role


def separate(recipe: Recipe) -> bool:
    """Return whether trainer and generator have devices of their own."""
    return recipe.cluster is not None and recipe.cluster.is_separate


def ranks_per_generator(recipe: Recipe, chosen: Mapping[Role, Entry]) -> int:
    """Neighbouring ranks of a node that share one generator."""
    cluster, entry = recipe.cluster, chosen.get("generator")
    if cluster is None or entry is None or entry.provider is None or separate(recipe):
        return 1
    options = selected_options(recipe.generator, "generator", entry.name, entry.provider.config)
    return max(1, num_devices(entry, options))  # what is wrong with less the plugin's own check says


def sharing_problems(recipe: Recipe, num_ranks: int) -> Iterator[Problem]:
    """A problem where the ranks of a node cannot be divided among generators of `num_ranks` each."""
    if recipe.cluster is not None and not separate(recipe) and recipe.cluster.ranks_per_node % num_ranks:
        yield Problem(
            path="cluster.gpus_per_node",
            found=f"{recipe.cluster.gpus_per_node}, to be divided among generators that take {num_ranks} each",
            expected=f"a multiple of {num_ranks}",
            remedy="Change it, or the number of devices that a generator takes",
        )


def generator_devices(
    recipe: Recipe, device: Literal["cpu", "cuda"], num_ranks: int, local_rank: int = 0
) -> tuple[int, ...] | None:
    """The devices of the generator that a rank hosts, where the cluster's layout decides them; None otherwise."""
    return None if recipe.cluster is None or device == "cpu" else recipe.cluster.generator_devices(local_rank, num_ranks)
