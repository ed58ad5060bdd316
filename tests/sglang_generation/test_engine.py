"""The process of an engine that ends before it is ready, or is not ready in time."""

from pathlib import Path

import pytest

from rlcore.spi import WorkerError
from rlcore_sglang.engine import Engine

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
