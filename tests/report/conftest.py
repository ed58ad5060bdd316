"""The command line without a terminal, and runs with the fakes."""

from ..core.cli.conftest import invoke as invoke  # type: ignore[import-not-found]
from ..core.run.conftest import prepared as prepared  # type: ignore[import-not-found]
from ..core.run.conftest import run as run  # type: ignore[import-not-found]
