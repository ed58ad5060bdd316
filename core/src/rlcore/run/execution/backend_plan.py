"""The arguments of trainer and generator."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rlcore import spi
from rlcore.config.recipe import Recipe
from rlcore.gpu import Device
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.registry.discovery import Entry, ObserverEntry


class BackendPlan(Protocol):
    """The part of a run's plan that knows nothing of its data."""

    @property
    def recipe(self) -> Recipe:
        """The recipe."""

    @property
    def algorithm(self) -> AlgorithmHandle:
        """The algorithm."""

    @property
    def chosen(self) -> Mapping[spi.Role, Entry]:
        """The plugin of each role that the recipe uses."""

    @property
    def observers(self) -> tuple[ObserverEntry, ...]:
        """The observers of trainer and generator."""

    @property
    def observer_options(self) -> Mapping[str, object]:
        """The recipe's section of each observer in use that takes options."""

    @property
    def device(self) -> Device:
        """The kind of device."""

    @property
    def model(self) -> spi.ModelSpec:
        """The facts about the model that backends get."""

    @property
    def channel(self) -> str | None:
        """Return the refit channel; None where nothing generates."""

    @property
    def shares_devices(self) -> bool:
        """Return whether trainer and generator take turns on the same device."""

    @property
    def overlaps(self) -> bool:
        """Return whether the generator goes on while the trainer trains."""

    @property
    def ranks_per_generator(self) -> int:
        """Neighbouring ranks that share one generator."""

    @property
    def reference_is_apart(self) -> bool:
        """Return whether the reference has devices of its own."""

    @property
    def reference_config(self) -> Any:
        """The options of the trainer's plugin for whatever holds the reference."""

    @property
    def generator_lora(self) -> spi.LoraSpec | None:
        """The adapters that travel unmerged; None where there are none."""

    def config(self, role: spi.Role) -> Any:
        """The recipe's section of the chosen plugin."""

    def trainer_context(self, rank_info: spi.RankInfo) -> spi.TrainerContext:
        """The arguments of a rank's trainer."""

    def reference_context(self, rank_info: spi.RankInfo) -> spi.TrainerContext:
        """The arguments of a rank's reference, where that has its own devices."""

    def critic_context(self, rank_info: spi.RankInfo) -> spi.TrainerContext | None:
        """The arguments of a rank's critic; None where none is trained."""

    def generator_context(self, rank_info: spi.RankInfo, log_directory: Path | None) -> spi.GeneratorContext:
        """The arguments of a rank's generator."""
