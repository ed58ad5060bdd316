"""The base class of the handles of trainers and generators: it checks calls, attributes errors and keeps the lifecycle.

For each call the weights and the other state have to be at these places:

| Call | weights | state | else |
|---|---|---|---|
| train_step, forward_backward, forward_backward_together, optim_step, use_adapter | device | device | |
| get_logprobs, get_values, export_weights | device | any | |
| refit | device | any | |
| generate, stream | device | device | the last refit was accepted |
| set_residency | any | any | a generator's: nothing is generated meanwhile |
| save_state, load_state | any | any | |
| close | any | any | legal in a failed backend too, and again |

A failed backend allows only close. It fails when one of the calls of the first row, set_residency or load_state raises (its
state is then unknown) or returns what it must not. A NonFiniteError, BoundError or ContractError that one of the first row
raises itself means that nothing but gradients was changed. A refit that fails leaves a generator without weights that count,
until the next one is accepted; so does a WorkerError of a generator's set_residency. The other calls read only, and leave a
backend usable whatever they raise.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal, TypeVar

from attrs import define

from rlcore.registry.checks import check_int, check_record
from rlcore.registry.discovery import Entry
from rlcore.registry.hooks import CallRecord
from rlcore.registry.plugin_errors import described, exit_error, is_fatal_to_process, set_error_owner
from rlcore.spi import capabilities
from rlcore.spi.errors import ContractError, RlcoreError
from rlcore.spi.lifecycle import (
    CloseRequest,
    LoadStateRequest,
    LoadStateResult,
    Place,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
)

ResultT = TypeVar("ResultT")
_NEEDS: dict[str, tuple[bool, bool]] = {
    "train_step": (True, True),
    "forward_backward": (True, True),
    "forward_backward_together": (True, True),
    "optim_step": (True, True),
    "use_adapter": (True, True),
    "get_logprobs": (True, False),
    "get_values": (True, False),
    "export_weights": (True, False),
    "generate": (True, True),
    "stream": (True, True),
    "refit": (True, False),
}
"""Places where weights, and other state, have to be."""


@define
class BackendState:
    """The state of a backend's lifecycle, which its handle keeps."""

    owner: str
    """The backend's name in messages."""
    phase: Literal["open", "failed", "closed"] = "open"
    weights: Place = "device"
    state: Place = "device"
    weight_version: int | None = None
    """The version held: a fresh trainer's is what its first call names, a generator's is None until a refit is accepted."""
    failure: str = ""
    """The cause of the failure."""

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


class BackendHandle:
    """One backend, bound. Each hook is a method: legality first, then the call, then the checks of what came back.

    A backend's own exception passes through with a note that names the plugin and the hook. The table of this module
    says what is legal when; which failures end a backend stands below it.
    """

    state_changing: ClassVar[frozenset[str]] = frozenset({"set_residency", "load_state"})
    """Hooks after whose failure the backend's state is unknown."""
    least_loaded_version: ClassVar[int] = 0

    def __init__(self, entry: Entry, hooks: Any, record: CallRecord) -> None:
        self.entry = entry
        self._hooks = hooks
        self._record = record
        self._state = BackendState(owner=entry.label)

    @property
    def weight_version(self) -> int | None:
        """The version of the weights held; None while none counts or none has been told."""
        return self._state.weight_version

    @property
    def is_usable(self) -> bool:
        """True where the backend is open and in a known state."""
        return self._state.phase == "open"

    def has(self, capability: str) -> bool:
        """Return whether the provider declares a capability."""
        return self.entry.provider is not None and capability in self.entry.provider.capabilities

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what the backend holds. Needs the capability `residency` for all but the fully resident state."""
        self._require_legal("set_residency", request, SetResidencyRequest)
        moves = (request.weights, request.state) != ("device", "device")
        self._require_capabilities("set_residency", {capabilities.RESIDENCY: moves})
        result = self._call("set_residency", request, SetResidencyResult, _check_residency)
        self._state.weights, self._state.state = request.weights, request.state
        return result

    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Write the state; every file that the result names is there."""
        self._require_legal("save_state", request, SaveStateRequest)
        needed = {capabilities.SAVE_HF: request.kind == "hf", capabilities.LORA: request.kind == "peft"}
        self._require_capabilities("save_state", needed)
        return self._call("save_state", request, SaveStateResult, lambda result: _check_files(request, result))

    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        """Restore a state; the version that it holds is the one that counts from then on."""
        self._require_legal("load_state", request, LoadStateRequest)
        result = self._call("load_state", request, LoadStateResult, self._check_loaded)
        self._loaded(result.weight_version)
        return result

    def close(self, request: CloseRequest | None = None) -> None:
        """Free everything. Legal in every state; the backend is called the first time only."""
        if self._state.phase != "closed":
            self._state.phase = "closed"
            self._call("close", request or CloseRequest(), object)

    def _require_legal(self, hook: str, request: object, expected: type) -> None:
        if not isinstance(request, expected):
            raise ContractError(f"{self.entry.label}: {hook} takes a {expected.__name__}; found a {type(request).__name__}")
        self._state.require(hook)

    def _require_capabilities(self, hook: str, needed: Mapping[str, bool]) -> None:
        """Raise ContractError unless the provider declares every capability that is needed."""
        missing = [repr(capability) for capability, is_needed in needed.items() if is_needed and not self.has(capability)]
        if missing:
            capabilities = "capability" if len(missing) == 1 else "capabilities"
            named = ", ".join(missing)
            raise ContractError(f"{self.entry.label}: this {hook} needs the {capabilities} {named}, which it does not declare")

    def _call(
        self, hook: str, request: object, expected: type[ResultT], check: Callable[[ResultT], None] | None = None
    ) -> ResultT:
        """Call the backend through pluggy, and check what it returned: its class first, then by `check`.

        The backend's own result comes before what observers made of it, and before what they raised.
        """
        record, label = self._record, self.entry.label
        record.clear()
        try:
            returned = getattr(self._hooks, hook)(request=request)
        except BaseException as error:
            if record.answered:
                self._accept(label, hook, record.result, expected, check)
            self._failed(hook, error)
            if isinstance(error, SystemExit) and not is_fatal_to_process(error):
                raise exit_error(f"{record.culprit or label}: {hook}", error) from error
            raise
        result = self._accept(label, hook, record.result, expected, check)
        if returned is result:
            return result
        return self._accept(f"{record.culprit}, around {label}", hook, returned, expected, check)

    def _accept(
        self, owner: str, hook: str, returned: object, expected: type[ResultT], check: Callable[[ResultT], None] | None
    ) -> ResultT:
        try:
            result = check_record(returned, expected)
            if check is not None:
                check(result)
        except RlcoreError as error:
            if hook in self.state_changing:
                self._state.fail(hook)
            raise type(error)(f"{owner}: {hook} returned what it must not: {error}") from error
        return result

    def _failed(self, hook: str, error: BaseException) -> None:
        """Note on an error who raised it, and whether the backend can be used after it."""
        record, label = self._record, self.entry.label
        if record.culprit is not None:
            set_error_owner(error, record.culprit)
        if record.culprit is None:
            error.add_note(f"raised in {hook} of {label}")
            is_harmless = self._harmless(hook, record.error or error)
        elif record.error is not None:
            own = described(record.error)
            error.add_note(f"raised by {record.culprit} in place of what {hook} of {label} had raised: {own}")
            is_harmless = self._harmless(hook, record.error)
        else:
            when = "after" if record.answered else "before"
            error.add_note(f"raised by {record.culprit} {when} {hook} of {label}")
            # What the backend had answered is lost, and with it the state that it is in.
            is_harmless = not record.answered or hook not in self.state_changing
        if not is_harmless:
            self._state.fail(hook)

    def _harmless(self, hook: str, error: BaseException) -> bool:  # noqa: ARG002 - others' depend on the error
        """Return whether a hook that raised left the backend in its former state."""
        return hook not in self.state_changing

    def _check_loaded(self, result: LoadStateResult) -> None:
        check_int("weight_version", result.weight_version, at_least=self.least_loaded_version)

    def _loaded(self, weight_version: int) -> None:
        self._state.weight_version = weight_version


def _check_residency(result: SetResidencyResult) -> None:
    check_int("device_bytes", result.device_bytes, at_least=0)
    if result.reserved_bytes is not None:
        check_int("reserved_bytes", result.reserved_bytes, at_least=0)


def _check_files(request: SaveStateRequest, result: SaveStateResult) -> None:
    if not isinstance(result.files, tuple) or not all(isinstance(name, str) for name in result.files):
        raise ContractError(f"files: found {result.files!r}; expected a tuple of paths as strings")
    for name in result.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ContractError(f"files: found {name!r}; expected a path below the directory, relative to it")
        if not (request.directory / name).is_file():
            raise ContractError(f"files: {name!r} is not in {request.directory}; expected a file that was written")


@contextmanager
def closed_after(handle: BackendHandle) -> Iterator[None]:
    """Close the backend whatever happens. Where something had failed before, a failing close is a note on that."""
    try:
        yield
    except BaseException as error:
        try:
            handle.close()
        except Exception as failure:
            error.add_note(f"{handle.entry.label} then failed in close too: {described(failure)}")
        raise
    handle.close()
