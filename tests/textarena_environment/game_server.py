"""The server of sessions with a model that plays by a function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from attrs import define, field

from rlcore.spi import FinishReason, SamplingParams, SessionEndpoint
from rlcore_serve.sessions.interface import Sample, SampleRequest, Segment
from rlcore_serve.sessions.served_model import ServedModel
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Session, Sessions

from ..serving.sessions.chat_model import END, END_ID, ChatMl


@define(eq=False)
class Player:
    """A sampler whose answer follows from the text that it reads."""

    move: Callable[[str], str]
    tokenizer: ChatMl = field(factory=ChatMl)

    async def sample(self, request: SampleRequest) -> Sample:
        text = self.move(self.tokenizer.show(request.prompt.tolist()))
        tokens = np.asarray(self.tokenizer.encode(text + END), np.int32)
        return Sample(
            text=text,
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.5, np.float32),
            weight_versions=np.zeros(len(tokens), np.int32),
            finish_reason=FinishReason.STOP,
        )


@define(eq=False)
class Arena:
    """A server, and what its sessions recorded."""

    url: str
    sessions: Sessions
    opened: list[Session] = field(factory=list)

    def endpoint(self) -> SessionEndpoint:
        session = self.sessions.open(seed=(1,))
        self.opened.append(session)
        return SessionEndpoint(base_url=f"{self.url}/{session.token}/v1", api_key=session.token, model="policy")

    def recorded(self) -> list[Segment]:
        """The sequences of the session that was opened last."""
        return self.sessions.finish(self.opened[-1])


@contextmanager
def arena(move: Callable[[str], str], **options: Any) -> Iterator[Arena]:
    """Serve a model that answers with `move` of all that it has read."""
    player, sessions = Player(move), Sessions()
    defaults: dict[str, Any] = {"max_sequence_length": 20_000, "sampling": SamplingParams(stop_token_ids=(END_ID,))}
    model = ServedModel(name="policy", tokenizer=player.tokenizer, sampler=player, **{**defaults, **options})
    with serving(model, sessions) as url:
        yield Arena(url, sessions)
