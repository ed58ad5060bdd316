"""The session server of a run: OpenAI's API with a session for each episode."""

from contextlib import ExitStack

from attrs import frozen

from rlcore.spi import SessionEndpoint
from rlcore_serve.sessions.host import session_host
from rlcore_serve.sessions.interface import Segment, SessionContext
from rlcore_serve.sessions.served_model import ServedModel
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Session, Sessions


@frozen(kw_only=True, eq=False)
class EpisodeSession:
    """See the interface of Session."""

    endpoint: SessionEndpoint
    _session: Session
    _sessions: Sessions

    @property
    def number(self) -> int:
        """Its own in this process."""
        return self._session.number

    @property
    def num_samples(self) -> int:
        """Samples that were asked for so far."""
        return self._session.num_samples

    @property
    def num_unanswered(self) -> int:
        """See Session."""
        return self._session.num_samples - self._session.num_answered

    def finish(self) -> list[Segment]:
        """Refuse its requests from now on, and return what was recorded."""
        return self._sessions.finish(self._session)


class EpisodeServer:
    """See the interface of SessionServer."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._model = ServedModel(
            name=context.model_name,
            tokenizer=context.tokenizer,
            sampler=context.sampler,
            max_sequence_length=context.max_sequence_length,
            sampling=context.sampling,
            capabilities=context.capabilities,
            vocab_size=context.vocab_size,
            history=context.history,
            parse=context.parse_tool_calls,
            tool_form=context.tool_form,
            shows_tools=context.shows_tools,
            keeps_kept=context.keeps_kept,
            note=context.note,
        )
        self._sessions = Sessions()
        self._serving = ExitStack()
        self._address = ""

    def open(self) -> None:
        """Listen on a free port of this machine."""
        self._address = self._serving.enter_context(serving(self._model, self._sessions, host=session_host()))

    def begin(self, seed: tuple[int, ...]) -> EpisodeSession:
        """Return a session whose clients choose neither the distribution nor longer answers than the recipe lets pass."""
        session = self._sessions.open(seed=seed, sampling=self._context.sampling, max_tokens=self._context.max_tokens)
        endpoint = SessionEndpoint(
            base_url=f"{self._address}/{session.token}/v1", api_key=session.token, model=self._context.model_name
        )
        return EpisodeSession(endpoint=endpoint, session=session, sessions=self._sessions)

    def close(self) -> None:
        """End the server."""
        self._serving.close()
