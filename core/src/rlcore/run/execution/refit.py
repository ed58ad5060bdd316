"""Bringing the generator to the trainer's weights, and by which way."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from attrs import frozen

from rlcore.config.recipe import Recipe
from rlcore.registry.device import Device
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.selection import AUTO_ROLES
from rlcore.run.plan.generator_placement import separate
from rlcore.run.protocols import GeneratorGroup, RefitOrder, WeightRoute
from rlcore.run.report.progress import Progress
from rlcore.spi import DtypeName, PluginError, RefitChannel, RefitError, Role, WorkerError

ResultT = TypeVar("ResultT")

CHANNELS: dict[Device, tuple[RefitChannel, ...]] = {
    # Mapping the sender's memory costs as little as handing it over, and leaves the generator an interpreter of its own.
    "cuda": ("cuda_ipc", "nccl", "in_process", "directory"),
    "cpu": ("in_process", "shared_memory", "directory"),
}
"""By device, cheapest first."""
BETWEEN_DEVICES: tuple[RefitChannel, ...] = ("nccl", "directory")
"""From a GPU that trains to those that generate, cheapest first."""


def choose_channel(recipe: Recipe, chosen: Mapping[Role, Entry], device: Device, declared: Registry) -> RefitChannel | None:
    """The cheapest channel of the device that trainer and generator both declare; None where nothing generates."""
    if "generator" not in chosen:
        return None
    entries = [chosen[role] for role in AUTO_ROLES]
    possible = CHANNELS[device]
    if separate(recipe) and device == "cuda":
        # What a section takes away follows from the devices that it names; here the cluster's layout names them.
        entries = [entry for role in AUTO_ROLES for entry in declared.of(role) if entry.name == chosen[role].name]
        possible = BETWEEN_DEVICES
    providers = [entry.provider for entry in entries if entry.provider is not None]
    wanted = possible if recipe.refit.channel == "auto" else (recipe.refit.channel,)
    for channel in wanted:
        if channel in possible and all(f"refit.{channel}" in provider.capabilities for provider in providers):
            return channel
    found = "; ".join(
        f"{provider.name}: {', '.join(sorted(name for name in provider.capabilities if 'refit.' in name)) or 'none'}"
        for provider in providers
    )
    place = f"{device}, between devices" if possible is BETWEEN_DEVICES else device
    raise PluginError(
        f"no channel brings weights from trainer to generator on {place}. Wanted: {', '.join(wanted)}. Declared, as "
        f"configured: {found}. On {place} there are {', '.join(possible)}. "
        "Choose another generator, or set refit.channel to one that both declare."
    )


@frozen(kw_only=True, eq=False)
class Refitter:
    """Exports, hands over, and counts a version only once the generator has acknowledged every digest."""

    route: WeightRoute
    generator: GeneratorGroup
    channel: RefitChannel
    dtype: DtypeName
    max_bucket_bytes: int
    max_attempts: int
    progress: Progress

    def refit(self, weight_version: int) -> None:
        """Raises RefitError or WorkerError where the generator does not hold what the trainer exported, in no attempt."""
        order = RefitOrder.of(weight_version, self.dtype, self.max_bucket_bytes, self.channel)
        for attempt in range(1, self.max_attempts + 1):
            try:
                self.route.hand_over(order)
            except (RefitError, WorkerError) as error:
                if attempt == self.max_attempts or not self.generator.is_usable:
                    raise
                self.progress.note(f"refit to version {weight_version} failed and is tried again: {first_line(error)}")
            else:
                return

    def generating(self, generate: Callable[[], ResultT], refit: Callable[[], None], lost: Callable[[], None]) -> ResultT:
        """What `generate` returns once `refit` has brought the weights. A worker that dies in it costs one more attempt: the
        seeds are the same, and so are the samples. `lost` is called where the generator may have lost its weights with it."""
        for attempt in range(1, self.max_attempts + 1):
            refit()
            try:
                return generate()
            except WorkerError as error:
                lost()
                if attempt == self.max_attempts or not self.generator.is_usable:
                    raise
                self.progress.note(f"generation failed and is tried again: {first_line(error)}")
        raise AssertionError("unreachable: refit.max_attempts is at least 1")


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]
