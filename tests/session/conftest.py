"""Sessions of a small model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import rlcore
from rlcore_session import Session
from rlcore_torchkit.testing.models import make_model

from .session_support import recipe_of

OpenSession = Callable[..., Session]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits."""
    return make_model(tmp_path_factory.mktemp("session") / "model", alphabet="0123456789+=", max_length=64)


@pytest.fixture
def opened(model: Path) -> Iterator[OpenSession]:
    """Opens sessions of the model, which are closed at the test's end."""
    with ExitStack() as stack:
        yield lambda reference=False, **sections: stack.enter_context(
            rlcore.open(recipe_of(model, **sections), reference=reference)
        )


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Session]:
    """A session for tests that change none of its weights."""
    with rlcore.open(recipe_of(model)) as session:
        yield session
