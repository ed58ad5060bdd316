"""The conformance kit's checks of routing fail every mutant."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SUITE = Path(__file__).parent / "routing_mutant_suite.py"
BASES = ("WrongGenerator", "WrongTrainer")
MUTANTS = [
    node.name
    for node in ast.parse(SUITE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef) and any(isinstance(base, ast.Name) and base.id in BASES for base in node.bases)
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each mutant's check said, in a process that knows the suite by its name."""
    report = tmp_path_factory.mktemp("routing-mutants") / "report.xml"
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", "--import-mode=prepend", "-o", "addopts=", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", str(SUITE), *options]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=report.parent, env=os.environ, timeout=240)
    assert finished.returncode == 1, finished.stdout[-3000:] + finished.stderr[-3000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    return {case.attrib["classname"].rpartition(".")[2].removeprefix("Test"): case.find("failure") for case in cases}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_kit_fails_the_mutant(failures, mutant):
    failure = failures[mutant]
    assert failure is not None
    assert "AssertionError" in failure.attrib["message"], failure.attrib["message"]
