"""Where a package is missing."""

import sys

from rlcore_textarena.provider import unavailable


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch):
    assert unavailable() is None
    monkeypatch.setitem(sys.modules, "textarena", None)
    assert unavailable() == "no package textarena. Install: pip install textarena"
