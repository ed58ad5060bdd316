"""What is published: every package, the same bytes from the same sources, with license, typing marker and description, nothing
that does not belong in it, and installable by name."""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.wide  # continuous integration builds all packages and installs some in jobs of their own


@pytest.fixture(scope="module")
def wheels(built):
    return sorted(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sources(built):
    return sorted(built.glob("*.tar.gz"))


def test_every_package_is_built(builder, wheels, sources):
    assert len(wheels) == len(sources) == len(builder.packages())


def test_a_second_build_at_another_time_and_place_gives_the_same_bytes(builder, built, tmp_path, monkeypatch):
    monkeypatch.setenv(builder.EPOCH, "1700000000")
    copy = tmp_path / "elsewhere"
    (copy / ".git").mkdir(parents=True)
    shutil.copy(ROOT / ".gitignore", copy)  # which a source distribution carries
    for folder in (ROOT / "core", ROOT / "plugins/grpo"):
        shutil.copytree(folder, copy / folder.name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
    builder.build([copy / "core", copy / "grpo"], tmp_path / "again")
    digests = (built / builder.DIGESTS).read_text().splitlines()
    again = (tmp_path / "again" / builder.DIGESTS).read_text().splitlines()
    assert len(again) == 4
    assert set(again) <= set(digests)


def test_the_digests_are_those_of_the_files(builder, built, wheels, sources):
    lines = dict(reversed(line.split("  ")) for line in (built / builder.DIGESTS).read_text().splitlines())
    assert lines == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (*wheels, *sources)}


def test_wheels_carry_license_marker_and_valid_metadata(wheels):
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            information = f"{'-'.join(path.name.split('-')[:2])}.dist-info"
            metadata = Metadata.from_email(archive.read(f"{information}/METADATA"), validate=True)
            assert archive.read(f"{information}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes(), path.name
            times = {time.strftime("%Y-%m-%d", (*entry.date_time, 0, 0, 0)) for entry in archive.infolist()}
        assert times == {"2023-11-14"}
        assert metadata.license_expression == "Apache-2.0"
        assert metadata.license_files == ["LICENSE"]
        assert metadata.description
        [package] = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
        assert f"{package}/py.typed" in names
        assert not [name for name in names if name.endswith((".pyc", ".so")) or _is_test(name)]


def _is_test(name):
    """Those in templates are of the packages that are made of them."""
    return "test_" in name.rpartition("/")[2] and not name.startswith("rlcore_conformance/templates/")


def test_wheels_hold_every_tracked_file_of_their_package(builder, wheels):
    for folder in (ROOT / one.folder for one in builder.packages()):
        path = by_name(folder, wheels)
        tracked = subprocess.run(
            ["git", "-C", str(folder / "src"), "ls-files"], check=True, capture_output=True, text=True
        ).stdout.split()
        assert set(tracked) <= set(zipfile.ZipFile(path).namelist()), f"{path.name} lacks files of {folder}"


def by_name(folder, wheels):
    name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
    [found] = [path for path in wheels if path.name.startswith(f"{name}-")]
    return found


def test_source_distributions_build_the_same_wheel(builder, built, sources, wheels, tmp_path, monkeypatch):
    monkeypatch.setenv(builder.EPOCH, "1700000000")
    for path in sources:
        with tarfile.open(path) as archive:
            assert {(member.uid, member.gid, member.uname) for member in archive} == {(0, 0, "")}
            archive.extractall(tmp_path, filter="data")
    folders = sorted(path for path in tmp_path.iterdir())
    for folder in folders:
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
        headers = HeaderParser().parsestr((folder / "PKG-INFO").read_text())
        assert folder.name == f"{headers['Name'].replace('-', '_')}-{headers['Version']}"
    made = builder.build(folders, tmp_path / "out")
    from_source = {path.name: path.read_bytes() for path in made if path.suffix == ".whl"}
    assert from_source == {path.name: path.read_bytes() for path in wheels}


def test_a_folder_with_files_in_it_is_refused(builder, tmp_path):
    (tmp_path / "rlcore-0.0.1.tar.gz").touch()
    with pytest.raises(SystemExit, match=r"rlcore-0\.0\.1\.tar\.gz; expected an empty folder"):
        builder.build([], tmp_path)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment that sees the newest of each distribution that is installed here, but for rlcore's own."""
    folder = tmp_path_factory.mktemp("fresh")
    others = folder / "others"
    others.mkdir()
    newest = {}
    for path in (Path(entry) for entry in sys.path):
        for found in path.iterdir() if any(path.glob("*.dist-info")) else ():
            name, _, version = found.name.removesuffix(".dist-info").partition("-")
            is_metadata = found.suffix == ".dist-info"
            key = (canonicalize_name(name), "of metadata") if is_metadata else found.name
            order = Version(version) if is_metadata else Version("0")
            if not name.startswith(("rlcore", "_editable")) and found.suffix != ".pth":
                newest[key] = max(newest.get(key, (order, found)), (order, found), key=lambda pair: pair[0])
    for _, found in newest.values():
        (others / found.name).symlink_to(found)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    [site] = (folder / "venv/lib").glob("python*/site-packages")
    (site / "others.pth").write_text(f"{others}\n")
    return folder / "venv"


def test_packages_install_by_name_and_find_each_other(built, environment):
    python = environment / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--isolated", "install"]
    options = ["--quiet", "--no-compile", "--no-index", "--find-links", str(built)]
    subprocess.run([*pip, *options, "rlcore", "rlcore-doctor", "rlcore-megatron", "rlcore-grpo"], check=True)
    listing = subprocess.run(
        [environment / "bin/rlcore", "plugins", "--json"], check=True, capture_output=True, text=True, cwd=environment
    ).stdout
    rows = {row["name"]: row for row in json.loads(listing)["plugins"] if row["distribution"] != "rlcore"}
    assert {row["distribution"] for row in rows.values()} == {"rlcore-grpo", "rlcore-megatron"}
    assert rows["megatron"]["usable"], rows["megatron"]["reason"]
    place = "import rlcore; print(rlcore.__file__)"
    printed = subprocess.run([python, "-c", place], check=True, capture_output=True, text=True, cwd=environment).stdout
    assert Path(printed.strip()).is_relative_to(environment)
