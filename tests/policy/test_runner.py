"""A test that ends its process or takes long is named, and all others run."""

import subprocess
import sys
from pathlib import Path

CONFTEST = """
import sys

sys.path.insert(0, {support!r})
from runner import Runner


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Runner(config, 0.5))
"""
ENDS = """
import os, time

def test_first():
    pass

def test_ends():
    time.sleep(2)
    os._exit(1)

def test_last():
    pass
"""
PASSES = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_passes(number):
    pass
"""


def test_all_other_tests_run_where_one_ends_its_process(root: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(support=str(root / "tests" / "support")))
    for number in range(8):
        (tmp_path / f"test_{number}.py").write_text(ENDS if number == 5 else PASSES)
    options = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert "1 failed, 37 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "test_5.py::test_ends has run for" in ran.stdout
    assert "test_5.py::test_ends ended its process" in ran.stdout
