"""The adapters that a generator's engines hold: a number of vLLM's and a version for each name."""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import field, frozen

from rlcore.spi import ContractError, RefitRequest
from rlcore_vllm.channels.manifest import NO_PLACE, AdapterPlace


@frozen(kw_only=True)
class HeldAdapters:
    """The adapters that count in all engines. Without any it is the model, by the name "" and the number 0."""

    numbers: Mapping[str, int] = field(factory=dict, converter=MappingProxyType)
    """The number of each adapter; none where no weights count."""
    versions: Mapping[int, int] = field(factory=dict, converter=MappingProxyType)
    """The version of each adapter, by its number."""

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def require(self, weight_version: int, adapter: str) -> None:
        """ContractError unless an adapter is held at a version."""
        number = self.numbers.get(adapter)
        if number is None or self.versions[number] != weight_version:
            raise self._refusal(f"version {weight_version} of {adapter!r}" if adapter else f"version {weight_version}")

    def require_any(self, weight_version: int) -> None:
        """ContractError unless one of the adapters is held at a version."""
        if weight_version not in self.versions.values():
            raise self._refusal(f"version {weight_version}")

    def place(self, request: RefitRequest, *, of_adapters: bool) -> AdapterPlace:
        """The number of the adapter that a refit brings, and the adapters that then stay. One that is held keeps its number,
        by which unfinished samples go on. Another one gets a number that none has: samples of those that are forgotten end."""
        if not of_adapters:
            return NO_PLACE
        forgotten = {*request.drops, request.adapter, *(self.numbers if request.weights.has_weights else ())}
        kept = {number: self.versions[number] for name, number in self.numbers.items() if name not in forgotten}
        free = (number for number in range(1, len(self.numbers) + 2) if number not in self.versions)
        return AdapterPlace(number=self.numbers.get(request.adapter) or next(free), kept=kept)

    def after(self, request: RefitRequest, place: AdapterPlace) -> "HeldAdapters":
        """The adapters held after a refit."""
        kept = {name: number for name, number in self.numbers.items() if number in place.kept}
        return HeldAdapters(
            numbers={**kept, request.adapter: place.number}, versions={**place.kept, place.number: request.weight_version}
        )

    def _refusal(self, expected: str) -> ContractError:
        named = (
            f"version {self.versions[number]}" + (f" of {name!r}" if name else "") for name, number in self.numbers.items()
        )
        return ContractError(f"generate: found {', '.join(named) or 'no weights'}; expected {expected}. Refit first")
