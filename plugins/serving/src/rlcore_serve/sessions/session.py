"""Sessions: each has a token that its client shows, and a record of what was sampled for it."""

import asyncio
import secrets
from contextlib import nullcontext
from itertools import count

import numpy as np
from attrs import define, field

from rlcore.spi import SamplingParams
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.interface import Segment
from rlcore_serve.sessions.record import Record

TOKEN_BYTES = 16
_MAX_REMEMBERED = 65_536
"""Number of finished sessions whose token gives the error "session_finished". Older tokens give the error of a wrong token."""


@define(kw_only=True, eq=False)
class Session:
    """One client's requests, such as those of one episode."""

    token: str
    """The client's token: 128 random bits."""
    record: Record | None = field(factory=Record)
    """None where nothing is recorded."""
    seed: tuple[int, ...] | None = None
    """Key of numpy's SeedSequence that the seeds of its samples follow from; None draws them at random."""
    sampling: SamplingParams | None = None
    """The distribution that all its samples are of, where the client may choose none; None where it may."""
    max_tokens: int | None = None
    """Most tokens of an answer; None for as many as the model's limit leaves."""
    number: int = field(factory=count().__next__)
    """Its own in this process."""
    num_samples: int = 0
    """Samples that were asked for."""
    num_answered: int = 0
    """Samples that were generated to their end, and answered."""
    is_finished: bool = False
    order: asyncio.Lock | nullcontext[None] = field(init=False)
    """Lock that is held while a request is read: a recorded session reads its requests in the order of arrival."""

    @order.default
    def _order(self) -> asyncio.Lock | nullcontext[None]:
        return nullcontext() if self.record is None else asyncio.Lock()

    def next_seed(self, chosen: int | None, number: int) -> int:
        """Return the seed of sample `number` of a request. One that the client chose makes it repeatable, within the session
        where that has a seed of its own."""
        if chosen is None and self.seed is None:
            return secrets.randbits(63)
        place = (self.num_samples,) if chosen is None else (chosen, number)
        self.num_samples += 1
        entropy = (*(self.seed or ()), chosen is not None, *place)
        return int(np.random.SeedSequence([int(part) for part in entropy]).generate_state(1, np.uint64)[0] >> 1)

    def require_open(self) -> None:
        """RequestError with status 401 where the session is finished."""
        if self.is_finished:
            raise RequestError(401, "this session is finished: its requests are no longer answered", code="session_finished")


class Sessions:
    """All sessions of a server. Any thread may open and finish them."""

    def __init__(self, shared: Session | None = None) -> None:
        """`shared` answers the clients that show its token as their API key; one whose token is empty, all that show no other
        session's."""
        self._shared = shared
        self._open: dict[str, Session] = {}
        self._finished: dict[str, Session] = {}

    def open(
        self, *, seed: tuple[int, ...] | None = None, sampling: SamplingParams | None = None, max_tokens: int | None = None
    ) -> Session:
        """Open a session with a token of its own."""
        session = Session(token=secrets.token_hex(TOKEN_BYTES), seed=seed, sampling=sampling, max_tokens=max_tokens)
        self._open[session.token] = session
        return session

    def finish(self, session: Session) -> list[Segment]:
        """Refuse the session's requests from now on, those under way too, and return what was recorded, in order."""
        session.is_finished = True
        if self._open.pop(session.token, None) is not None:
            self._finished[session.token] = Session(token=session.token, record=None, is_finished=True)
            if len(self._finished) > _MAX_REMEMBERED:
                del self._finished[next(iter(self._finished))]
        return [] if session.record is None else session.record.segments()

    def find(self, in_path: str | None, authorization: str | None) -> Session:
        """Return the session of a request, whose token is in its path or else its bearer token. RequestError with status 401
        where there is none of it, or it is finished."""
        scheme, _, bearer = (authorization or "").partition(" ")
        token = in_path if in_path is not None else bearer.strip() if scheme.lower() == "bearer" else ""
        session = self._open.get(token) or self._finished.get(token)
        shared = self._shared
        if session is None and in_path is None and shared is not None and shared.token in ("", token):
            session = shared
        if session is None:
            found = "the token of no session" if token else "no token"
            expected = "that of a session, in the path (http://HOST:PORT/TOKEN/v1) or as the API key"
            if shared is not None:
                found, expected = "another API key" if token else "no API key", "the one that the server was started with"
            raise RequestError(401, f"found {found}; expected {expected}", code="invalid_api_key")
        session.require_open()
        return session
