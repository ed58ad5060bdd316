"""What a trainer and a generator in the driver's own process have in common: they answer for their one handle."""

from typing import Generic, TypeVar

from attrs import frozen

from rlcore.registry.handle import BackendHandle
from rlcore.spi import (
    LoadStateRequest,
    LoadStateResult,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
)

HandleT = TypeVar("HandleT", bound=BackendHandle)


@frozen(kw_only=True, eq=False)
class InProcessGroup(Generic[HandleT]):
    """A group of one backend in this process."""

    handle: HandleT

    @property
    def is_usable(self) -> bool:
        """Whether it is open and in a known state."""
        return self.handle.is_usable

    def has(self, capability: str) -> bool:
        """Whether the provider declares a capability."""
        return self.handle.has(capability)

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what the backend holds to the host or to the device."""
        return self.handle.set_residency(request)

    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Write the backend's state."""
        return self.handle.save_state(request)

    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        """Restore a state that save_state wrote."""
        return self.handle.load_state(request)
