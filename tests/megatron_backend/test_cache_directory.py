"""Where models in Megatron's own format are kept, and whether they can be."""

from collections import namedtuple
from pathlib import Path

import pytest

from rlcore_megatron.checkpoints import cache_directory
from rlcore_megatron.checkpoints.cache_directory import HUB, OWN, directory_problems

pytestmark = pytest.mark.usefixtures("home")
Usage = namedtuple("Usage", "total used free")


def found() -> tuple[str, str]:
    """The setting that the one problem of the present directory is of, and what was found."""
    (problem,) = directory_problems(cache_directory.cache_directory(), None)
    assert problem.expected == "a directory that can be written to"
    assert OWN in problem.remedy
    return problem.path, problem.found


def test_the_cache_is_in_the_first_of_three_places(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory.cache_directory() == home / ".cache" / "huggingface" / "rlcore"
    monkeypatch.setenv(HUB, str(home / "hub"))
    assert cache_directory.cache_directory() == home / "hub" / "rlcore"
    monkeypatch.setenv(OWN, "~/own")
    assert cache_directory.cache_directory() == home / "own"


def test_a_directory_that_can_be_made_is_right_and_is_not_made(home: Path) -> None:
    assert list(directory_problems(home / "new" / "rlcore", 1)) == []
    assert list(directory_problems(home, None)) == []
    assert list(home.iterdir()) == []


def test_a_directory_that_cannot_be_written_to_is_that_of_its_setting(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN, "/proc/self/rlcore")  # where not even root makes files
    path, text = found()
    assert path == OWN
    assert text.startswith("/proc/self/rlcore, whose parent /proc/self is where it would be made: ")
    monkeypatch.setenv(OWN, "/proc/self")
    assert found()[1].startswith("/proc/self: ")
    (home / "file").write_text("")
    monkeypatch.delenv(OWN)
    monkeypatch.setenv(HUB, str(home / "file"))
    place = home / "file" / "rlcore"
    assert found() == (HUB, f"{place}, whose parent {home / 'file'} is where it would be made: Not a directory")


def test_a_file_system_without_room_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_directory.shutil, "disk_usage", lambda path: Usage(2**30, 2**20, 2**20))
    directory = home / "kept"
    assert list(directory_problems(directory, 2**20)) == []
    assert list(directory_problems(directory, None)) == []
    (problem,) = directory_problems(directory, 2**21)
    assert (problem.path, problem.found) == (str(directory), f"{directory} with 1.0 MiB free")
    assert problem.expected.startswith("2.0 MiB")
