"""What a backend may be asked for in which state; the same for every backend of a role.

| Call | weights | state | else |
|---|---|---|---|
| train_step | device | device | |
| get_logprobs, export_weights | device | any | |
| refit | device | any | |
| generate | device | device | the last refit was accepted |
| set_residency, save_state, load_state | any | any | |
| close | any | any | legal in a failed backend too, and again |

A failed backend allows only close. It fails when train_step, set_residency or load_state raises (its state is then unknown)
or returns what it must not; a NonFiniteError, BoundError or ContractError that train_step raises itself means that nothing was
changed.
A refit that fails leaves a generator without weights that count, until the next one is accepted. The other calls read
only, and leave a backend usable whatever they raise.
"""

from typing import Literal

from attrs import define

from rlcore.spi.errors import ContractError
from rlcore.spi.lifecycle import Place

_NEEDS: dict[str, tuple[bool, bool]] = {
    "train_step": (True, True),
    "get_logprobs": (True, False),
    "export_weights": (True, False),
    "generate": (True, True),
    "refit": (True, False),
}
"""Whether weights, and other state, must be on the device."""


@define
class BackendState:
    """Where a backend is in its life; kept by its handle."""

    owner: str
    """How messages call the backend."""
    phase: Literal["open", "failed", "closed"] = "open"
    weights: Place = "device"
    state: Place = "device"
    weight_version: int | None = None
    """The version held: a fresh trainer's is what its first call names, a generator's is None until a refit is accepted."""
    failure: str = ""
    """What made the backend fail."""

    def require(self, hook: str) -> None:
        """Raise ContractError unless `hook` is legal now."""
        if self.phase == "closed":
            raise ContractError(f"{self.owner}: {hook} after close; build the backend anew")
        if self.phase == "failed":
            raise ContractError(f"{self.owner}: {hook} after it failed in {self.failure}; only close is legal now")
        weights, state = _NEEDS.get(hook, (False, False))
        absent = [
            name
            for name, needed, place in (("weights", weights, self.weights), ("state", state, self.state))
            if needed and place != "device"
        ]
        if absent:
            raise ContractError(f"{self.owner}: {hook} needs on the device: {' and '.join(absent)}; call set_residency first")

    def require_version(self, hook: str, requested: int) -> None:
        """Raise ContractError unless the version asked for is the one held."""
        if self.weight_version is not None and requested != self.weight_version:
            raise ContractError(f"{self.owner}: {hook} at weight version {requested}; it holds {self.weight_version}")

    def fail(self, hook: str) -> None:
        """Record a failure: from now on only close is legal."""
        self.phase = "failed"
        self.failure = hook
