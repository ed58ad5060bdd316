"""A server that speaks the few requests which an upload to the Hub makes."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from attrs import define, field


@define
class Hub:
    """What a server was sent, and with which state it refuses."""

    address: str = ""
    refuses: int | None = None
    created: list[dict[str, Any]] = field(factory=list)
    files: dict[str, bytes] = field(factory=dict)
    tokens: set[str | None] = field(factory=set)

    def answer(self, path: str, body: bytes) -> Any:
        """The body of an answer."""
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.address}/ann/sums"}
        if path == "/api/models/ann/sums/preupload/main":
            named = [one["path"] for one in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in named]}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        assert path == "/api/models/ann/sums/commit/main"
        parts = [json.loads(line) for line in body.splitlines()]
        self.files |= {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in parts if one["key"] == "file"}
        return {"commitUrl": f"{self.address}/ann/sums/commit/0", "commitOid": "0", "pullRequestUrl": None}


@contextmanager
def serving_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve, and have the Hub's client ask here."""
    made = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.tokens.add(self.headers["Authorization"])
            text = json.dumps({"error": "no"} if made.refuses else made.answer(self.path.partition("?")[0], body)).encode()
            self.send_response(made.refuses or 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.send_error(made.refuses or 404)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", made.address)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
