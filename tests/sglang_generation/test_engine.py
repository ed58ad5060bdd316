"""The process of an engine: its start, what it samples, and what becomes of calls that fail, stop or last too long."""

import asyncio
import signal
import threading
from collections.abc import Iterator
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


SGLANG = """
import asyncio
import os
import signal
from types import SimpleNamespace

class Manager:
    def __init__(self):
        self.aborted = asyncio.Event()

    def abort_request(self, rid):
        self.aborted.set()

    async def flush_cache(self, timeout_s):
        return SimpleNamespace(success=True, message="")

class Engine:
    def __init__(self, **arguments):
        assert arguments == {"model_path": "a"}
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), Manager()

    async def async_generate(self, input_ids, sampling_params, return_logprob, rid):
        if sampling_params == "wait":
            await self.tokenizer_manager.aborted.wait()
        if sampling_params == "fail":
            raise ValueError("planted")
        if sampling_params == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if sampling_params == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        meta = {"output_token_logprobs": [(-0.5, token, None) for token in input_ids], "finish_reason": {"type": "length"}}
        return {"output_ids": input_ids, "meta_info": meta}
"""
FOREVER = {"timeout_s": 300.0, "key": "generate_timeout_s"}


def samples_of(*kinds: str) -> list[dict[str, Any]]:
    return [{"number": number, "prompt": [number, 7], "sampling": kind} for number, kind in enumerate(kinds)]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    put_sglang(tmp_path, monkeypatch, SGLANG)
    (tmp_path / "sglang" / "srt" / "managers").mkdir()
    (tmp_path / "sglang" / "srt" / "managers" / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / "managers" / "io_struct.py").touch()
    one = Engine({"model_path": "a"}, tmp_path / "logs", start_timeout_s=300.0)
    yield one
    one.end()


def test_samples_come_as_they_end(engine: Engine) -> None:
    found: list[Any] = []
    engine.generate(samples_of("go", "go"), found.append, **FOREVER)
    assert sorted(found) == [(number, [number, 7], [-0.5, -0.5], {"type": "length"}) for number in range(2)]


def test_what_is_interrupted_is_aborted_and_the_engine_goes_on(engine: Engine) -> None:
    def interrupt(_sample: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(samples_of("go", "wait"), interrupt, **FOREVER)
    engine.ask("begin_update", **FOREVER)  # it waits for what runs
    test_samples_come_as_they_end(engine)
    assert engine.is_usable


def test_an_interrupted_wait_leaves_no_answer_to_the_next_call(engine: Engine) -> None:
    main = threading.get_ident()
    threading.Timer(2.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(samples_of("wait"), print, **FOREVER)
    engine.ask("begin_update", **FOREVER)
    test_samples_come_as_they_end(engine)


def test_a_failure_is_told_with_its_cause_and_the_engine_goes_on(engine: Engine) -> None:
    with pytest.raises(WorkerError, match=r"(?s)SGLang .* generate: ValueError: planted.*sglang\.log"):
        engine.generate(samples_of("fail", "wait"), print, **FOREVER)
    with pytest.raises(WorkerError, match=r"SGLang failed in load: ImportError"):
        engine.ask("load", "nothing", **FOREVER)
    test_samples_come_as_they_end(engine)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("die", "ended with signal SIGKILL"), *((kind, r"generate within 2 s .*sglang\.generate_") for kind in ("wait", "stop"))],
)
def test_a_process_that_dies_or_gives_nothing_for_too_long_is_over(engine: Engine, kind: str, said: str) -> None:
    with pytest.raises(WorkerError, match=f"SGLang .*{said}"):
        engine.generate(samples_of("go", kind), print, timeout_s=2.0, key="generate_timeout_s")
    assert not engine.is_usable
    with pytest.raises(WorkerError, match="SGLang "):
        engine.ask("begin_update", **FOREVER)


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit("planted")], ids=["Exception", "SystemExit"])
def test_each_call_of_the_host_is_answered(error: BaseException) -> None:
    """Also where the method ends with what would end the event loop."""

    class Answering(Host):
        async def method(self) -> Any:
            raise error

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=f"{type(error).__name__}: planted"):
            Answering(SimpleNamespace(tokenizer_manager=None, loop=loop)).call("method")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
