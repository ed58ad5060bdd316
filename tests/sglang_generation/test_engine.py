"""The process of an engine that ends before it is ready, or is not ready in time."""

import asyncio
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.spi import WorkerError
from rlcore_sglang.engine import Engine
from rlcore_sglang.host import Host

MODULE = "sglang/srt/entrypoints/engine.py"


def put_sglang(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What the engine's process imports in place of SGLang."""
    file = directory / MODULE
    file.parent.mkdir(parents=True)
    for folder in list(file.relative_to(directory).parents)[:-1]:
        (directory / folder / "__init__.py").touch()
    file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(directory))


def test_a_start_that_fails_is_told_with_the_last_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_sglang(tmp_path, monkeypatch, "raise SystemExit('no kernels here')")
    with pytest.raises(WorkerError, match=r"(?s)sglang\.log.*no kernels"):
        Engine({}, tmp_path / "logs", start_timeout_s=300.0)


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_sglang(tmp_path, monkeypatch, "import time; time.sleep(3600)")
    with pytest.raises(WorkerError, match=r"0\.5 s .*generator\.sglang\.start_timeout_s"):
        Engine({}, tmp_path / "logs", start_timeout_s=0.5)


HOST = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.send((-1, "result", None))
connection.recv()
connection.send_bytes(b"no pickle")
connection.recv()
"""


def test_an_answer_that_cannot_be_read_ends_the_call_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rlcore_sglang" / "host.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").touch()
    file.write_text(HOST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = Engine({}, tmp_path / "logs", start_timeout_s=300.0)
    try:
        with pytest.raises(WorkerError, match="cannot be read"):
            engine.call("generate", timeout_s=300.0, key="generate_timeout_s")
    finally:
        engine.close()


class Connection:
    """Sends what can be pickled."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        pickle.dumps(message)
        self.sent.append(message)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda: None, "cannot be sent"),
        (ValueError("planted"), "ValueError: planted"),
        (SystemExit("planted"), "SystemExit: planted"),
        (1, None),
    ],
    ids=["no pickle", "Exception", "SystemExit", "result"],
)
def test_each_call_of_the_host_is_answered(found: Any, said: str | None) -> None:
    class Answering(Host):
        async def method(self, call: int) -> Any:
            if isinstance(found, BaseException):
                raise found
            return found

    connection = Connection()
    host = Answering(SimpleNamespace(tokenizer_manager=None), connection)  # type: ignore[arg-type]
    asyncio.run(host.answer(7, "method", ()))
    ((call, kind, content),) = connection.sent
    assert (call, kind) == (7, "result" if said is None else "error")
    assert said is None or said in content
