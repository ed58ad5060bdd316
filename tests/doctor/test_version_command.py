"""`rlcore version`: rlcore, its plugins and libraries."""

import json
import sys

import pytest
from click.testing import CliRunner

from rlcore import __version__
from rlcore.cli.main import cli


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_version_lists_plugins_and_libraries(options: list[str]) -> None:
    output = CliRunner().invoke(cli, ["version", *options]).output
    found = json.loads(output) if options else dict(line.split() for line in output.splitlines())
    assert found["rlcore"] == found["rlcore-doctor"] == __version__
    assert found["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert "numpy" in found


def test_the_version_alone() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output == f"rlcore {__version__}\n"
