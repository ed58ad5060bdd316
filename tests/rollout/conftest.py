"""Runs with the fakes, as the tests of the core's loop have them."""

from ..core.run.conftest import prepared as prepared  # type: ignore[import-not-found]
from ..core.run.conftest import registry_with as registry_with
from ..core.run.conftest import run as run
