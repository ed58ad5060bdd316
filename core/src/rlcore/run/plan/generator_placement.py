"""Which ranks host a generator, and on which devices."""

from collections.abc import Iterator, Mapping
from typing import Literal

from rlcore.config.convert import selected_options
from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import Entry
from rlcore.registry.plugin_errors import is_outside
from rlcore.spi import PluginError, Problem, Role


def separate(recipe: Recipe) -> bool:
    """Whether trainer and generator have devices of their own."""
    return recipe.cluster is not None and recipe.cluster.placement == "separate"


def generator_span(recipe: Recipe, chosen: Mapping[Role, Entry]) -> int:
    """Neighbouring ranks of a node that share one generator."""
    cluster, entry = recipe.cluster, chosen.get("generator")
    if cluster is None or entry is None or entry.provider is None or separate(recipe):
        return 1
    options = selected_options(recipe.generator, "generator", entry.name, entry.provider.config)
    try:
        return max(1, int(entry.provider.num_devices(options)))  # what is wrong with less the plugin's own check says
    except BaseException as error:
        if is_outside(error):
            raise
        raise PluginError(f"{entry.label}: its function `num_devices` raised {type(error).__name__}: {error}") from error


def span_problems(recipe: Recipe, span: int) -> Iterator[Problem]:
    """Ranks of a node that cannot be divided among generators."""
    if recipe.cluster is not None and not separate(recipe) and recipe.cluster.ranks_per_node % span:
        yield Problem(
            path="cluster.gpus_per_node",
            found=f"{recipe.cluster.gpus_per_node}, which are to be shared with generators that span {span} of them each",
            expected=f"a multiple of {span}",
            remedy="Change it, or how many devices the generator spans.",
        )


def hosts_generator(recipe: Recipe, span: int, rank: int) -> bool:
    """Whether it is the first of those that share one; with devices that only generate, the first of its node."""
    assert recipe.cluster is not None
    return rank % (recipe.cluster.ranks_per_node if separate(recipe) else span) == 0


def generator_devices(recipe: Recipe, device: Literal["cpu", "cuda"], span: int, local_rank: int = 0) -> tuple[int, ...] | None:
    """Of the generator that a rank hosts, where the cluster's layout says so."""
    if recipe.cluster is None or device == "cpu":
        return None
    if separate(recipe):
        return tuple(range(recipe.cluster.ranks_per_node, recipe.cluster.gpus_per_node))
    return None if span == 1 else tuple(range(local_rank, local_rank + span))
