"""`rlcore version`: rlcore, its plugins and libraries."""

import json
import sys

from rlcore import __version__


def test_version_lists_plugins_and_libraries(invoke) -> None:
    found = json.loads(invoke("version", "--json").output)
    assert found["rlcore"] == __version__
    assert found["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert "numpy" in found
    assert invoke("version").output.startswith("rlcore")


def test_the_version_alone(invoke) -> None:
    assert invoke("--version").output == f"rlcore {__version__}\n"
