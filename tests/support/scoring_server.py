"""A server that scores prompts as vLLM's does, by a formula."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def logprob(token, place, scale):
    return -scale * (1 + token % 5) - 0.01 * place


def told(ids, text_of, scale=1.0):
    """The entries of vLLM's server for a prompt."""
    entries = [
        {str(token): {"logprob": logprob(token, place, scale), "rank": 2, "decoded_token": text_of(token)}}
        for place, token in enumerate(ids)
    ]
    return [None, *entries[1:]]


@contextmanager
def endpoint(answer) -> Iterator[tuple[str, list]]:
    """A server whose completions are `answer(body)`, or a status; its address, and the requests that it got."""
    asked: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, {"data": [{"id": "teacher"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"key": self.headers.get("Authorization")})
            found = answer(body)
            if isinstance(found, int):
                self._send(found, {"error": f"status {found}"})
            else:
                self._send(200, {"choices": [{"text": "", "prompt_logprobs": found}]})

        def _send(self, status, value):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
