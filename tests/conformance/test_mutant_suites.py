"""The conformance kit's checks of routing, of adapters, of images and of optimizers fail every mutant."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.wide  # `make mutants` runs them too; tests/conformance/test_mutants.py has some of every other part
SUITES = ("routing_mutant_suite", "lora_mutant_suite", "image_mutant_suite", "optimizer_mutant_suite")
BASES = ("WrongGenerator", "WrongTrainer")


def file_of(suite):
    return Path(__file__).parent / f"{suite}.py"


MUTANTS = [
    (suite, node.name)
    for suite in SUITES
    for node in ast.parse(file_of(suite).read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef) and any(isinstance(base, ast.Name) and base.id in BASES for base in node.bases)
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each mutant's check said, in a process that knows the suites by their names."""
    report = tmp_path_factory.mktemp("mutants") / "report.xml"
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", "--import-mode=prepend", "-o", "addopts=", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *(str(file_of(suite)) for suite in SUITES), *options]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=report.parent, env=os.environ, timeout=600)
    assert finished.returncode == 1, finished.stdout[-3000:] + finished.stderr[-3000:]
    cases = [(case.attrib["classname"].split("."), case.find("failure")) for case in ElementTree.parse(report).iter("testcase")]
    return {(name[-2], name[-1].removeprefix("Test")): failure for name, failure in cases}


@pytest.mark.parametrize(("suite", "mutant"), MUTANTS)
def test_the_kit_fails_the_mutant(failures, suite, mutant):
    failure = failures[suite, mutant]
    assert failure is not None
    assert "AssertionError" in failure.attrib["message"], failure.attrib["message"]
