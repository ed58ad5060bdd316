"""Places generators on ranks and devices, and chooses the refit channel: the cheapest that both sides declare."""

from collections.abc import Iterator, Mapping
from typing import Literal

from rlcore.config.convert import selected_options
from rlcore.config.recipe import Recipe
from rlcore.gpu import Device
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.provider_calls import num_devices
from rlcore.registry.selection import AUTO, BACKEND_ROLES, require_named
from rlcore.registry.states import states_of
from rlcore.spi import ChannelProvider, PluginError, Problem, Role, capabilities


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


def choose_channel(recipe: Recipe, chosen: Mapping[Role, Entry], device: Device, declared: Registry) -> str | None:
    """The cheapest channel of the device that trainer and generator both declare; None where nothing generates, or the
    generator answers with weights of its own."""
    if "generator" not in chosen or "trainer" not in chosen:
        return None
    if not takes_weights(chosen["generator"]):
        raise PluginError(
            f"{chosen['generator'].label} takes no weights of a trainer: what it samples from never changes. Name another "
            "generator to train, or to measure a checkpoint; `rlcore eval` measures with it the model that it has"
        )
    entries = [chosen[role] for role in BACKEND_ROLES]
    channels = _usable(recipe, declared)
    possible = [channel for channel in channels if device in channel.devices]
    where: str = device
    delta, is_named = recipe.refit.delta, recipe.refit.channel != AUTO
    sharded = {channel.name for channel in channels if channel.sharded}
    apart = separate(recipe) and (device == "cuda" or delta != "off" or recipe.refit.channel in sharded)
    if apart:
        # What a section takes away follows from the devices that it names; here the cluster's layout names them.
        entries = [entry for role in BACKEND_ROLES for entry in declared.of(role) if entry.name == chosen[role].name]
        possible = [channel for channel in possible if channel.reach in ("separate", "anywhere")]
        where = f"{device}, between devices"
    else:
        possible = [channel for channel in possible if not channel.sharded]
    if delta != "off":
        possible = [channel for channel in possible if channel.delta]
        where = f'{where} with refit.delta = "{delta}"'
    providers = [entry.provider for entry in entries if entry.provider is not None]
    for channel in possible:
        is_wanted = not is_named or channel.name == recipe.refit.channel
        if is_wanted and all(channel.fits(provider.capabilities, separate=apart) for provider in providers):
            return channel.name
    found = "; ".join(
        f"{provider.name}: {', '.join(sorted(filter(_is_of_channels, provider.capabilities))) or 'none'}"
        for provider in providers
    )
    names = ", ".join(channel.name for channel in possible)
    raise PluginError(
        f"no channel brings weights from trainer to generator on {where}. "
        f"Wanted: {recipe.refit.channel if is_named else names or 'any'}. Declared, as configured: {found}. "
        f"On {where} there are {names or 'none'}. Choose another generator, or set refit.channel to one that both have."
    )


def _usable(recipe: Recipe, registry: Registry) -> list[ChannelProvider]:
    """Return the usable channels, the cheapest first. PluginError where the one that the recipe names is none of them."""
    if recipe.refit.channel != AUTO:
        require_named("refit.channel", recipe.refit.channel, registry.channels)
    usable = [one.entry.provider for one in states_of(registry.channels) if one.is_usable and one.entry.provider is not None]
    return sorted(usable, key=lambda channel: channel.cost)


def has_other_model(entry: Entry) -> bool:
    """Return whether a generator answers with a model that `model.path` does not name, such as an endpoint's: it neither reads
    that one nor is brought to its weights."""
    return not takes_weights(entry) and entry.provider is not None and not entry.provider.reads_model


def takes_weights(entry: Entry) -> bool:
    """Return whether a generator declares a channel at all, or has none of its own to begin with."""
    declared = frozenset() if entry.provider is None else entry.provider.capabilities
    return capabilities.OWN_WEIGHTS not in declared or any(map(_is_of_channels, declared))


def _is_of_channels(capability: str) -> bool:
    return capability.startswith("refit.") or capability in capabilities.ANY_CHANNEL
