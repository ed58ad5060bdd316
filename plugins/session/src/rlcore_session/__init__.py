"""rlcore as a library: `rlcore.open` returns a Session, which samples, computes gradients and updates the model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore_session.asynchronous import AsyncSession as AsyncSession
    from rlcore_session.errors import CallError as CallError
    from rlcore_session.opening import open_session as open_session
    from rlcore_session.records import Completion as Completion
    from rlcore_session.records import Datum as Datum
    from rlcore_session.records import Gradients as Gradients
    from rlcore_session.records import Update as Update
    from rlcore_session.session import Session as Session

_MODULES = {
    "AsyncSession": "asynchronous",
    "CallError": "errors",
    "Completion": "records",
    "Datum": "records",
    "Gradients": "records",
    "Session": "session",
    "Update": "records",
    "open_session": "opening",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: listing plugins imports this package too."""
    if name in _MODULES:
        return getattr(import_module(f"rlcore_session.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'rlcore_session' has no attribute {name!r}")
