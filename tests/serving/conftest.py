"""The command line without a terminal."""

from ..core.cli.conftest import invoke as invoke  # type: ignore[import-not-found]
