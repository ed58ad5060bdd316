"""Whatever a request costs, the server answers others meanwhile."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from attrs import evolve

from rlcore_serve.sessions import routes
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Session, Sessions

from .chat_model import END, ChatMl, Script, served

ONE = [{"role": "user", "content": "one?"}]
CHAT = ("chat/completions", {"messages": ONE})
RESPONSE = ("responses", {"input": "one?"})
TEXT = ("completions", {"prompt": "one?"})


class Blocking(ChatMl):
    """Stands still in one of its methods where a text has a mark in it."""

    def __init__(self, method: str = "", mark: str = "") -> None:
        super().__init__()
        self.method, self.mark = method, mark
        self.is_in, self.may_go_on = threading.Event(), threading.Event()

    def __getattribute__(self, name: str) -> Any:
        function = super().__getattribute__(name)
        if name != super().__getattribute__("method"):
            return function

        def slow(*args: Any) -> Any:
            if self.mark in str(args):
                self.is_in.set()
                assert self.may_go_on.wait(300)
            return function(*args)

        return slow


def health(address: str) -> str:
    with urllib.request.urlopen(f"{address}/health", timeout=300) as response:
        return str(json.loads(response.read())["status"])


def posted(address: str, path: str, body: dict[str, Any]) -> threading.Thread:
    """A request that is under way."""
    data = json.dumps({"model": "policy"} | body).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", data=data)
    thread = threading.Thread(target=lambda: urllib.request.urlopen(request).read())
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("encode", *CHAT),
        ("encode", *RESPONSE),
        ("encode", *TEXT),
        ("render_chat", *CHAT),
        ("render_chat", *RESPONSE),
        ("show", CHAT[0], CHAT[1] | {"logprobs": True}),
        ("show", CHAT[0], CHAT[1] | {"logprobs": True, "stream": True}),
        ("show", TEXT[0], TEXT[1] | {"logprobs": 1}),
        ("show", RESPONSE[0], RESPONSE[1] | {"include": ["message.output_text.logprobs"]}),
    ],
)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_server_answers_while_a_request_computes(method: str, path: str, body: dict[str, Any], is_recorded: bool) -> None:
    script, tokenizer, sessions = Script(f"a{END}"), Blocking(method), Sessions(Session(token="", record=None))
    with serving(served(script, tokenizer=tokenizer), sessions) as address:
        to = f"{address}/{sessions.open().token}" if is_recorded else address
        request = posted(to, path, body)
        assert tokenizer.is_in.wait(300)
        assert health(address) == "ok"
        tokenizer.may_go_on.set()
        request.join()


@pytest.mark.parametrize("reader", ["read_json", "read_request", "read_response_request"])
def test_the_server_answers_while_it_reads_a_request(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_in, may_go_on, read = threading.Event(), threading.Event(), getattr(routes, reader)

    def slow(*args: Any, **options: Any) -> Any:
        is_in.set()
        assert may_go_on.wait(300)
        return read(*args, **options)

    monkeypatch.setattr(routes, reader, slow)
    with serving(served(Script(f"a{END}")), Sessions(Session(token="", record=None))) as address:
        request = posted(address, *(RESPONSE if "response" in reader else CHAT))
        assert is_in.wait(300)
        assert health(address) == "ok"
        may_go_on.set()
        request.join()


def test_small_requests_do_not_wait_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "LARGE_BYTES", 1000)
    script, tokenizer = Script(*[f"a{END}"] * (routes.MAX_LARGE + 9)), Blocking("encode", "large")
    with serving(served(script, tokenizer=tokenizer), Sessions(Session(token="", record=None))) as address:
        large = [posted(address, "completions", {"prompt": "large" * 300}) for _ in range(routes.MAX_LARGE + 8)]
        assert tokenizer.is_in.wait(300)
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=60)
        assert client.completions.create(model="policy", prompt="small").choices[0].text == "a"
        tokenizer.may_go_on.set()
        for request in large:
            request.join()
    assert not script.texts


def test_a_text_that_is_too_long_is_not_encoded_whole() -> None:
    encoded: list[int] = []

    class Counting(ChatMl):
        def encode(self, text: str) -> list[int]:
            encoded.append(len(text))
            return super().encode(text)

    with serving(served(Script(), tokenizer=Counting()), Sessions(Session(token="", record=None))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        for ask in (
            lambda text: client.completions.create(model="policy", prompt=text),
            lambda text: client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}]),
            lambda text: client.responses.create(model="policy", input=text),
        ):
            for length in (3000, 500_000, 2_000_000, 40_000_000):
                with pytest.raises(openai.BadRequestError) as caught:
                    ask("x" * length)
                assert caught.value.code == "context_length_exceeded"
        assert max(encoded) == 16 * 2000
        assert health(address) == "ok"


def test_a_long_text_of_few_tokens_is_encoded_whole() -> None:
    class Dense(ChatMl):
        """A token for twenty characters."""

        def encode(self, text: str) -> list[int]:
            return super().encode(text)[::20]

    script = Script(f"a{END}")
    model = served(script, tokenizer=Dense(), max_sequence_length=200)
    request = routes.read_request({"model": "policy", "prompt": "x" * 3900}, model.sampling, is_chat=False)
    assert len(model.prepare(Session(token="", record=None), request).tokens) == 195


def test_metrics_are_those_of_engines_by_their_names(tmp_path: Path) -> None:
    line = 'vllm:num_requests_running{engine="0",model_name="m"} 7.0\n'
    for name in ("vllm-0", "vllm-1"):
        (tmp_path / f"{name}.prom").write_text(f"# TYPE vllm:num_requests_running gauge\n{line}")
    model = evolve(served(Script()), engine_logs=tmp_path)
    with serving(model, Sessions(Session(token="key", record=None))) as address:
        response = urllib.request.urlopen(f"{address}/metrics", timeout=300)
        shown = response.read().decode().splitlines()
    values = [line for line in shown if not line.startswith("#")]
    assert values == [f'vllm:num_requests_running{{engine="vllm-{number}",model_name="m"}} 7.0' for number in range(2)]


def test_a_model_without_engines_has_no_metrics() -> None:
    missing = pytest.raises(urllib.error.HTTPError)
    with missing as caught, serving(served(Script()), Sessions(Session(token="", record=None))) as address:
        urllib.request.urlopen(f"{address}/metrics", timeout=300)
    assert caught.value.code == 404
