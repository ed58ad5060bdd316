"""A server of the tinker protocol over a small model, and plain HTTP requests to it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

import rlcore_session
from rlcore_tinker.application import Served
from rlcore_tinker.promises import KEEP_S
from rlcore_tinker.server import served_model, start
from rlcore_tinker.wire import CLASSES

KEY = "tml-tests"
RANK = 4
MAX_LENGTH = 64


@frozen(kw_only=True, eq=False)
class Address:
    """A server that runs."""

    url: str
    model: str
    session: Any
    directory: Path
    """The folder of the server's files."""

    def post(self, name: str, body: Any, headers: Mapping[str, str] = {}) -> tuple[int, Any]:
        """Return status and JSON, or bytes, of a request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        sent = {"X-API-Key": KEY, "Content-Type": kind, **headers}
        return self._open(urllib.request.Request(f"{self.url}/api/v1/{name}", content, sent))

    def get(self, name: str) -> tuple[int, Any]:
        """Return status and JSON of a request."""
        return self._open(urllib.request.Request(f"{self.url}/api/v1/{name}", headers={"X-API-Key": KEY}))

    def result(self, request_id: str) -> Any:
        """Return the result of a future, once it has one."""
        while True:
            status, body = self.post("retrieve_future", {"request_id": request_id})
            if status != 200 or not isinstance(body, dict) or body.get("type") != "try_again":
                return body

    def _open(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                status, content, kind = reply.status, reply.read(), reply.headers.get_content_type()
        except urllib.error.HTTPError as error:
            status, content, kind = error.code, error.read(), error.headers.get_content_type()
        return status, json.loads(content) if kind == "application/json" and content else content


@contextmanager
def serving(
    directory: Path, model: Path, *, lora: Any = True, keep_s: float = KEEP_S, name: str | None = None, **recipe: Any
) -> Iterator[Address]:
    """A server of the model, with fsdp2 and transformers in this process. `lora` is False, True, or the section itself."""
    sections = {
        "model": {"path": str(model), "dtype": "float32"},
        "trainer": {"name": "fsdp2"},
        "generator": {"name": "transformers"},
        "rollout": {"max_prompt_tokens": MAX_LENGTH - 16, "max_response_tokens": 16},
        **({"lora": {"rank": RANK} if lora is True else lora} if lora else {}),
        **recipe,
    }
    with rlcore_session.open_session(sections, reference=bool(lora)) as session:
        served = Served(
            session=session,
            model=served_model(session, name),
            directory=directory / "checkpoints",
            scratch=directory / "scratch",
            has_reference=bool(lora),
            many_adapters=session.has_adapters,
            key=KEY,
            on_error=lambda error: None,
            keep_s=keep_s,
        )
        thread, url = start(served, "127.0.0.1", 0)
        try:
            yield Address(url=url, model=served.model.name, session=session, directory=directory)
        finally:
            thread.close()


def forward_backward(model_id: str, seq_id: int, tokens: Sequence[int], weights: Sequence[float]) -> bytes:
    """The body of a request with one datum, whose targets are the next tokens."""
    message = CLASSES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], np.int32).tobytes()
    for name, values, dtype in (
        ("target_tokens", np.array(tokens[1:], np.int64), 2),
        ("weights", np.array(weights, np.float32), 1),
    ):
        datum.loss_fn_inputs[name].dense, datum.loss_fn_inputs[name].dtype = values.tobytes(), dtype
        datum.loss_fn_inputs[name].shape.append(len(values))
    content: bytes = message.SerializeToString()
    return content
