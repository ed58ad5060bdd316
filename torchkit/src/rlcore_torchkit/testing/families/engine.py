"""The engine whose families are tried, as its package describes it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from attrs import frozen

from rlcore import spi

Device = Literal["cpu", "cuda"]
Digests = Mapping[str, int]
"""The digest of each tensor that a rank computes with, by its name in the engine's model."""


@frozen(kw_only=True)
class Family:
    """A family that both transformers and the engine have."""

    model_type: str
    class_name: str
    """transformers' class, which config.json names."""
    implementation: str
    """The engine's class."""


class TriedEngine(ABC):
    """An engine on a device, with the options that its tiny models have. Instances can be pickled."""

    name: ClassVar[str]
    """The generator's name in a recipe."""
    trainer: ClassVar[str]
    """The trainer whose weights are sent, by its name in a recipe."""
    command: ClassVar[str]
    """The module that `python -m` runs."""
    channel: ClassVar[str]
    """The channel of refits."""
    preloaded: ClassVar[Sequence[str]] = ()
    """Modules that children begin with, where they are forked."""
    provider: ClassVar[spi.Provider]
    initializer_range: ClassVar[float]
    """Standard deviation of weights: so small that tied models of these sizes are not certain of each token."""

    def __init__(self, device: Device) -> None:
        self.device = device

    @abstractmethod
    def families(self) -> dict[str, Family]:
        """Return the families that the installed transformers and the engine's registry both have, by model_type."""

    @abstractmethod
    def versions(self) -> str:
        """Return the versions that a result depends on, in words."""

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Return values of tiny configurations, by the names of fields, that the engine's kernels take."""

    @abstractmethod
    def options(self, model_type: str) -> Mapping[str, Any]:
        """Return further options of a family's tiny configuration."""

    @abstractmethod
    def config(self) -> Any:
        """Return the generator's section of a recipe, as `check` sees it."""

    @abstractmethod
    def start(self, context: spi.GeneratorContext) -> Any:
        """Return the generator's backend, started; errors of the engine pass through."""

    @abstractmethod
    def held_digests(self, backend: Any) -> Digests:
        """Return the digests of what a backend's engine computes with."""

    @abstractmethod
    def own_digests(self, model: spi.ModelSpec) -> Digests:
        """Return the same of an engine that has read a model's files by its own loader."""

    @abstractmethod
    def prepare_child(self) -> None:
        """Set what a process has to have before it imports the engine."""
