"""The scripts of release/, which are no package, and what they build."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "release"))  # the scripts import packages.py beside them
EPOCH = "1700000000"


def script(name):
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def builder():
    return script("build")


@pytest.fixture(scope="session")
def versions():
    return script("set_version")


@pytest.fixture(scope="session")
def check_tag():
    return script("check_tag")


@pytest.fixture(scope="session")
def first_run():
    return script("first_run")


@pytest.fixture
def checkout(builder, tmp_path):
    """A copy of the files that state the version."""
    for folder in (ROOT / one.folder for one in builder.packages()):
        (tmp_path / folder.relative_to(ROOT)).mkdir(parents=True)
        shutil.copy(folder / "pyproject.toml", tmp_path / folder.relative_to(ROOT))
    (tmp_path / "core/src/rlcore").mkdir(parents=True)
    shutil.copy(ROOT / "core/src/rlcore/__init__.py", tmp_path / "core/src/rlcore")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- A line.\n\n## [0.0.1] - 2020-01-01\n")
    return tmp_path


@pytest.fixture(scope="session")
def built(builder, tmp_path_factory):
    """Folder with both archives of every package."""
    folder = tmp_path_factory.mktemp("dist")
    before = os.environ.get(builder.EPOCH)
    os.environ[builder.EPOCH] = EPOCH
    try:
        builder.build([ROOT / one.folder for one in builder.packages()], folder)
    finally:
        os.environ.pop(builder.EPOCH)
        if before is not None:
            os.environ[builder.EPOCH] = before
    return folder
