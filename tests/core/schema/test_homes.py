"""A leading ~ or ~name: replaced where that home is known, and otherwise left and told."""

import os
import pwd
from pathlib import Path

import pytest

from rlcore.schema.file_limits import expanded, has_home

NOBODY = "~no-such-user/x"


def test_known_homes_are_put_in_place_and_all_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/the/home")
    user = pwd.getpwuid(os.getuid())
    assert expanded("~/x") == expanded(Path("~/x")) == Path("/the/home/x")
    assert expanded(f"~{user.pw_name}/x") == Path(user.pw_dir) / "x"
    for path in ("x/~", "./~x", "/~/x", NOBODY):
        assert expanded(path) == Path(path)


def test_who_has_no_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/the/home")
    assert [path for path in ("~", "~/x", "", "x", "./~no-such-user", "/~no-such-user", NOBODY) if not has_home(path)] == [
        NOBODY
    ]
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container, for a number without an entry
    assert not has_home("~/x")
