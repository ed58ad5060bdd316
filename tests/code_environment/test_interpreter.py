"""The paths of an interpreter are those that it needs."""

import os
import sys
from pathlib import Path

import pytest

from rlcore.spi import PluginError
from rlcore_code.interpreter import needed_by

OWN = Path(sys.executable).resolve()


def test_the_library_and_the_shared_libraries_are_seen_and_no_packages():
    needed = needed_by(OWN, ("-S",), ())
    assert str(OWN) in needed.visible
    assert os.path.dirname(os.__file__) in needed.visible
    assert any("libc.so" in path or "musl" in path for path in needed.visible)
    assert not any(path.endswith("-packages") for path in needed.visible)
    assert all(path.endswith("-packages") for path in needed.hidden)
    assert not {"/", "/usr", "/lib", "/bin", "/usr/bin", "/usr/lib"} & set(needed.visible)


def test_an_interpreter_of_an_environment_is_seen_with_its_links_and_packages():
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests run in no virtual environment")
    needed = needed_by(Path(sys.executable), (), ())
    assert {sys.executable, str(OWN), f"{sys.prefix}/pyvenv.cfg"} <= set(needed.visible)
    assert any(path.startswith(sys.prefix) and path.endswith("site-packages") for path in needed.visible)


@pytest.mark.parametrize("content", ["", "no program", "#!/bin/sh\nexit 3", "#!/bin/sh\necho no json"])
def test_what_is_no_interpreter_is_named(tmp_path, content):
    python = tmp_path / "python"
    python.write_text(content)
    python.chmod(0o755)
    with pytest.raises(PluginError, match=r"environment\.code\.python"):
        needed_by(python, (), ())
