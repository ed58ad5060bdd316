"""Chooses the refit channel of a run: the cheapest that trainer and generator both declare."""

from collections.abc import Mapping

from rlcore.config.recipe import Recipe
from rlcore.gpu import Device
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.selection import BACKEND_ROLES
from rlcore.run.plan.generator_placement import separate
from rlcore.spi import CHANNELS, PluginError, Role, capabilities


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
    possible = [name for name, channel in CHANNELS.items() if device in channel.devices]
    where: str = device
    named = CHANNELS.get(recipe.refit.channel)
    delta = recipe.refit.delta
    if separate(recipe) and (device == "cuda" or delta != "off" or (named is not None and named.sharded)):
        # What a section takes away follows from the devices that it names; here the cluster's layout names them.
        entries = [entry for role in BACKEND_ROLES for entry in declared.of(role) if entry.name == chosen[role].name]
        possible = [name for name in possible if CHANNELS[name].reach in ("separate", "any")]
        where = f"{device}, between devices"
    else:
        possible = [name for name in possible if not CHANNELS[name].sharded]
    if delta != "off":
        possible = [name for name in possible if CHANNELS[name].delta]
        where = f'{where} with refit.delta = "{delta}"'
    providers = [entry.provider for entry in entries if entry.provider is not None]
    wanted = possible if recipe.refit.channel == "auto" else [recipe.refit.channel]
    for channel in wanted:
        if channel in possible and all(f"refit.{channel}" in provider.capabilities for provider in providers):
            return channel
    found = "; ".join(
        f"{provider.name}: {', '.join(sorted(name for name in provider.capabilities if 'refit.' in name)) or 'none'}"
        for provider in providers
    )
    raise PluginError(
        f"no channel brings weights from trainer to generator on {where}. Wanted: {', '.join(wanted) or 'any'}. Declared, as "
        f"configured: {found}. On {where} there are {', '.join(possible) or 'none'}. "
        "Choose another generator, or set refit.channel to one that both declare."
    )


def has_other_model(entry: Entry) -> bool:
    """Whether a generator answers with a model that `model.path` does not name, such as an endpoint's: it neither reads that
    one nor is brought to its weights."""
    return not takes_weights(entry) and entry.provider is not None and not entry.provider.reads_model


def takes_weights(entry: Entry) -> bool:
    """Whether a generator declares a channel at all, or has none of its own to begin with."""
    declared = frozenset() if entry.provider is None else entry.provider.capabilities
    return capabilities.OWN_WEIGHTS not in declared or bool(declared & {channel.capability for channel in CHANNELS.values()})
