"""The sessions of clients: each is a program that is heard of every ten seconds, or has ended."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from rlcore_tinker.errors import RequestError

SILENCE_S = 35.0
"""Seconds without a word after which a client counts as gone. Clients send a heartbeat every 10 s."""


@define(kw_only=True, eq=False)
class ClientSession:
    """One client's session."""

    session_id: str
    created: float = field(factory=time.time)
    user_metadata: Mapping[str, Any] = field(factory=dict)
    display_name: str | None = None
    heard_s: float = field(factory=time.monotonic)
    """When the client was last heard of, on the monotonic clock."""
    is_finished: bool = False
    samplers: list[str] = field(factory=list)
    """Ids of its sampling sessions."""
    models: list[str] = field(factory=list)
    """Ids of the models that it created."""

    @property
    def silent_s(self) -> float:
        """Seconds since the client was last heard of."""
        return time.monotonic() - self.heard_s

    @property
    def is_gone(self) -> bool:
        """Return whether the client has ended its session, or has been silent for too long."""
        return self.is_finished or self.silent_s > SILENCE_S


class Clients:
    """The sessions of all clients."""

    def __init__(self) -> None:
        self._sessions: dict[str, ClientSession] = {}

    def begin(self, user_metadata: Mapping[str, Any], display_name: str | None) -> ClientSession:
        """Begin a session."""
        session = ClientSession(session_id=str(uuid.uuid4()), user_metadata=user_metadata, display_name=display_name)
        self._sessions[session.session_id] = session
        return session

    def find(self, session_id: str) -> ClientSession:
        """Return an open session, which was heard of now. RequestError where it has ended, or is none of this server's."""
        session = self.get(session_id)
        if session.is_finished:
            raise RequestError(f"session_id: found {session_id}, a session that its client has finished", status=410)
        session.heard_s = time.monotonic()
        return session

    def get(self, session_id: str) -> ClientSession:
        """Return a session, open or not."""
        if session_id not in self._sessions:
            raise RequestError(
                f"session_id: found {session_id!r:.100}, which this server does not know; expected one of create_session. "
                "Sessions end with the server",
                status=404,
            )
        return self._sessions[session_id]

    def ids(self) -> list[str]:
        """Return the ids of all sessions, the newest first."""
        return [*reversed(self._sessions)]
