"""A fixture that runs a test in each isolation, as root and as an ordinary user."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sandboxes import EVERY, Isolated


@pytest.fixture(params=EVERY, ids=" of ".join)
def isolated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Isolated]:
    """A sandbox of each isolation and user; a case that the machine refuses is skipped."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Isolated(*request.param, monkeypatch, Path(folder))
