"""Installed entry points and modules: of unreadable distributions, and of those that are found twice."""

import os
import sys
import types
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.installed import (
    DistributionError,
    build_of,
    for_another_python,
    foreign_module,
    installed_entry_points,
    is_installed,
)
from rlcore.registry.discovery import discover
from rlcore.registry.plugin_errors import message_of
from rlcore.registry.selection import ChosenPlugin, load_chosen
from rlcore.spi.errors import DataError


def only(registry, role="trainer"):
    (entry,) = registry.of(role)
    return entry


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            b"[rlcore.trainers]\nbad = bad:PROVIDER\nno value\n",
            "found 'no value' in line 3; expected name = package.module:attr",
        ),
        (b"[console_scripts]\n\xff = x:y\n", "UnicodeDecodeError"),
    ],
)
def test_a_distribution_with_a_malformed_file_is_named_and_does_not_stop_the_others(installer, content, text):
    installer.add("acme-malformed", {})
    (installer.folder / "acme_malformed-1.0.dist-info" / "entry_points.txt").write_bytes(content)
    installer.trainer("good", "acme-good", "2.5")
    registry = discover()
    assert [(entry.name, entry.distribution, entry.version) for entry in registry.of("trainer")] == [
        ("good", "acme-good", "2.5")
    ]
    (warning,) = registry.warnings
    assert warning.startswith(f"entry_points.txt of acme-malformed 1.0 in {installer.folder} cannot be read")
    assert text in warning
    entry = load_chosen(ChosenPlugin.of(only(registry)))
    assert entry == only(registry)


@pytest.mark.parametrize("malformed", [False, True], ids=["alone", "beside a malformed file"])
@pytest.mark.parametrize("content", [b"Author: Ren\xe9\n", bytes(range(128, 200))], ids=["Latin-1", "binary"])
def test_a_distribution_with_unreadable_metadata_is_named_and_does_not_stop_the_others(installer, content, malformed):
    installer.trainer("odd", "acme-odd", "1.5")
    (installer.folder / "acme_odd-1.5.dist-info" / "METADATA").write_bytes(b"Name: acme-odd\nVersion: 1.5\n" + content)
    installer.trainer("good", "acme-good", "2.5")
    if malformed:
        installer.add("acme-malformed", {})
        (installer.folder / "acme_malformed-1.0.dist-info" / "entry_points.txt").write_text("[x]\ngarbage\n")
    registry = discover()
    found = {entry.name: entry for entry in registry.of("trainer")}
    assert found["good"].error is None
    assert "METADATA" in found["odd"].error
    assert found["odd"].distribution == "acme_odd"
    warned = [
        warning for warning in registry.warnings if warning.startswith("METADATA of acme_odd 1.5 cannot be read: Unicode")
    ]
    assert (len(warned), len(registry.warnings)) == (1, 1 + malformed)


def test_a_distribution_seen_on_two_paths_counts_once(installer, tmp_path, monkeypatch):
    installer.trainer("mine")
    monkeypatch.setattr(sys, "path", [str(installer.folder), str(tmp_path / "site"), *sys.path])
    assert len(discover().of("trainer")) == 1


def test_distributions_are_read_again_as_one_comes_or_goes_and_not_before(installer, monkeypatch):
    installer.trainer("first")
    found = installed_entry_points()
    assert installed_entry_points() is found
    installer.trainer("second")
    assert {"first", "second"} <= installed_entry_points().entry_points.names
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(installer.folder)])
    assert installed_entry_points().entry_points.names.isdisjoint({"first", "second"})


def test_a_module_is_there_where_it_can_be_found_or_was_made_by_hand(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_by_hand", types.ModuleType("made_by_hand"))
    found = {
        name: is_installed(name) for name in ("json.decoder", "made_by_hand", "json.nothing", "os.path.nothing", "nothing", "")
    }
    assert [name for name, there in found.items() if there] == ["json.decoder", "made_by_hand"]


@pytest.mark.parametrize("name", ["METADATA", "entry_points.txt"])
@pytest.mark.parametrize("kind", ["a named pipe", "more bytes"])
def test_a_file_of_a_distribution_that_does_not_end_is_named(installer, name, kind):
    installer.trainer("odd", "acme-odd", "1.5")
    file = installer.folder / "acme_odd-1.5.dist-info" / name
    file.unlink()
    if kind == "a named pipe":
        os.mkfifo(file)
    else:
        file.touch()
        os.truncate(file, 2**30)
    with pytest.raises(DistributionError) as raised:
        installed_entry_points()
    assert str(raised.value).startswith(f"{file} is a pipe")
    assert str(raised.value).endswith("Reinstall it")
    result = CliRunner().invoke(cli, ["plugins"])
    assert (result.exit_code, str(file) in result.stderr) == (3, True)


def test_an_error_of_rlcore_stays_itself_beside_metadata_that_cannot_be_read(installer, monkeypatch):
    installer.add("acme-odd", {})
    (installer.folder / "acme_odd-1.0.dist-info" / "METADATA").write_bytes(bytes(range(128, 200)))

    def check(*_, **__):
        try:
            metadata.version("acme-missing")
        except metadata.PackageNotFoundError as error:
            raise DataError("rows lack prompt") from error

    monkeypatch.setattr("rlcore.registry.discovery.installed_entry_points", check)
    result = CliRunner().invoke(cli, ["plugins"])
    assert (result.exit_code, "acme_odd" in result.stderr) == (DataError.exit_code, False)


def test_metadata_that_a_library_cannot_read_is_named(installer, monkeypatch):
    """As transformers reads that of all packages while it is imported."""
    installer.add("acme-odd", {})
    (installer.folder / "acme_odd-1.0.dist-info" / "METADATA").write_bytes(bytes(range(128, 200)))

    def read(*_, **__):
        try:
            return metadata.metadata("acme-odd")["Name"]
        except UnicodeDecodeError as error:
            raise RuntimeError("a library did not import") from error

    monkeypatch.setattr("rlcore.registry.discovery.installed_entry_points", read)
    result = CliRunner().invoke(cli, ["plugins"])
    assert result.exit_code == 3
    assert "METADATA of acme_odd 1.0 cannot be read: UnicodeDecodeError" in result.stderr


OWN, FOREIGN = f"a/own{EXTENSION_SUFFIXES[0]}", "a/other.cpython-399-x86_64-linux-gnu.so"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([FOREIGN], FOREIGN),
        (["a/other.cp399-win_amd64.pyd", "a/__init__.py"], "a/other.cp399-win_amd64.pyd"),
        ([FOREIGN, OWN], None),
        ([FOREIGN, "a/stable.abi3.so"], None),
        (["a/libshared.so", "a/other.cpython-399.pyc", "a/x.so.1"], None),
        ([], None),
    ],
)
def test_extension_modules_for_another_python(files, expected):
    assert for_another_python(files) == expected


@pytest.mark.parametrize("statement", ["import acme_ext._native", "from acme_ext import _native"])
def test_a_failed_import_names_the_module_for_another_python(tmp_path, monkeypatch, statement):
    folder = tmp_path / "acme_ext"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (folder / "__init__.py").write_text("")
    with pytest.raises(ImportError) as plain:
        exec(statement)
    assert foreign_module(plain.value) is None
    (folder / "_native.cpython-399-x86_64-linux-gnu.so").write_text("")
    assert foreign_module(plain.value) == str(folder / "_native.cpython-399-x86_64-linux-gnu.so")
    assert "_native.cpython-399-x86_64-linux-gnu.so is for another Python" in message_of(plain.value)
    wrapped = ImportError("the package of anvils cannot be imported")
    wrapped.__cause__ = plain.value
    assert "_native.cpython-399-x86_64-linux-gnu.so is for another Python" in message_of(wrapped)
    wrapped.__cause__ = wrapped
    assert foreign_module(wrapped) is None
    sys.modules.pop("acme_ext")


@pytest.mark.parametrize(
    ("version", "module", "build"),
    [
        ("2.13.0+cpu", None, "cpu"),
        ("2.13.0", "__version__ = '2.13.0+cu130'\n", "cu130"),
        ("2.13.0", "from typing import Any\n__version__: str = '2.13.0+cu130'\n", "cu130"),
        ("2.13.0", "__version__ = '2.13.0'\n", ""),
        ("2.13.0", None, ""),
    ],
)
def test_the_build_is_that_of_the_version_or_of_the_packages_own_file(installer, version, module, build):
    installer.add("acme", {}, version=version)
    if module is not None:
        (installer.folder / "acme").mkdir()
        (installer.folder / "acme" / "version.py").write_text(module)
    assert build_of(metadata.distribution("acme")) == build
