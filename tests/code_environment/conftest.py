"""Each isolation, as root and as an ordinary user."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sandboxes import EVERY, Isolated


@pytest.fixture(params=EVERY, ids=" of ".join)
def isolated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Isolated]:
    """Each isolation, as root and as an ordinary user; skipped by name where the machine refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Isolated(*request.param, monkeypatch, Path(folder))
