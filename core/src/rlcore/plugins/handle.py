"""What the handles of trainers and generators share: calls with legality and attribution, and the lifecycle."""

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypeVar

from rlcore.plugins.checks import check_int, check_record
from rlcore.plugins.discovery import Entry
from rlcore.plugins.states import BackendState
from rlcore.spi import capabilities
from rlcore.spi.errors import ContractError, RlcoreError
from rlcore.spi.lifecycle import (
    CloseRequest,
    CloseResult,
    LoadStateRequest,
    LoadStateResult,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
)

ResultT = TypeVar("ResultT")


class BackendHandle:
    """One backend, bound. Each hook is a method: legality first, then the call, then the checks of what came back.

    A backend's own exception passes through with a note that names the plugin and the hook. `rlcore.plugins.states` says
    what is legal when, and which failures end a backend.
    """

    state_changing: ClassVar[frozenset[str]] = frozenset({"set_residency", "load_state"})
    """Hooks after whose failure the backend's state is unknown."""
    least_loaded_version: ClassVar[int] = 0

    def __init__(self, entry: Entry, hooks: Any) -> None:
        self.entry = entry
        self._hooks = hooks
        self._state = BackendState(owner=entry.label)

    @property
    def weight_version(self) -> int | None:
        """The version of the weights held; None while none counts or none has been told."""
        return self._state.weight_version

    @property
    def is_usable(self) -> bool:
        """Whether it is open and in a known state."""
        return self._state.phase == "open"

    def has(self, capability: str) -> bool:
        """Whether the provider declares a capability."""
        return self.entry.provider is not None and capability in self.entry.provider.capabilities

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what the backend holds. Needs the capability `residency` for all but the fully resident state."""
        self._require_legal("set_residency", request, SetResidencyRequest)
        if (request.weights, request.state) != ("device", "device"):
            self._require_capability("set_residency", capabilities.RESIDENCY)
        result = self._call("set_residency", request, SetResidencyResult, _check_residency)
        self._state.weights, self._state.state = request.weights, request.state
        return result

    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Write the state; every file that the result names is there."""
        self._require_legal("save_state", request, SaveStateRequest)
        if request.kind == "hf":
            self._require_capability("save_state", capabilities.SAVE_HF)
        return self._call("save_state", request, SaveStateResult, lambda result: _check_files(request, result))

    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        """Restore a state; the version that it holds is the one that counts from then on."""
        self._require_legal("load_state", request, LoadStateRequest)
        result = self._call("load_state", request, LoadStateResult, self._check_loaded)
        self._loaded(result.weight_version)
        return result

    def close(self, request: CloseRequest | None = None) -> CloseResult:
        """Free everything. Legal in every state; the backend is called the first time only."""
        if self._state.phase == "closed":
            return CloseResult()
        self._state.phase = "closed"
        return self._call("close", request or CloseRequest(), CloseResult)

    def _require_legal(self, hook: str, request: object, expected: type) -> None:
        if not isinstance(request, expected):
            raise ContractError(f"{self.entry.label}: {hook} takes a {expected.__name__}; found a {type(request).__name__}")
        self._state.require(hook)

    def _require_capability(self, hook: str, capability: str) -> None:
        if not self.has(capability):
            raise ContractError(
                f"{self.entry.label}: this {hook} needs the capability {capability!r}, which it does not declare"
            )

    def _call(
        self, hook: str, request: object, expected: type[ResultT], check: Callable[[ResultT], None] | None = None
    ) -> ResultT:
        """Call the backend through pluggy, and check what it returned: its class first, then by `check`."""
        try:
            returned = getattr(self._hooks, hook)(request=request)
        except BaseException as error:
            error.add_note(f"raised in {hook} of {self.entry.label}")
            if not self._harmless(hook, error):
                self._state.fail(hook)
            raise
        try:
            result = check_record(returned, expected)
            if check is not None:
                check(result)
        except RlcoreError as error:
            if hook in self.state_changing:
                self._state.fail(hook)
            raise type(error)(f"{self.entry.label}: {hook} returned what it must not: {error}") from error
        return result

    def _harmless(self, hook: str, error: BaseException) -> bool:  # noqa: ARG002 - a trainer's depends on the error
        """Whether a backend whose hook raised is still in the state it was in."""
        return hook not in self.state_changing

    def _check_loaded(self, result: LoadStateResult) -> None:
        check_int("weight_version", result.weight_version, at_least=self.least_loaded_version)

    def _loaded(self, weight_version: int) -> None:
        self._state.weight_version = weight_version


def _check_residency(result: SetResidencyResult) -> None:
    check_int("device_bytes", result.device_bytes, at_least=0)


def _check_files(request: SaveStateRequest, result: SaveStateResult) -> None:
    if not isinstance(result.files, tuple) or not all(isinstance(name, str) for name in result.files):
        raise ContractError(f"files: found {result.files!r}; expected a tuple of paths as strings")
    for name in result.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ContractError(f"files: found {name!r}; expected a path below the directory, relative to it")
        if not (request.directory / name).is_file():
            raise ContractError(f"files: {name!r} is not in {request.directory}; expected a file that was written")
