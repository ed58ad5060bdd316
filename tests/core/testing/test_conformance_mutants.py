"""The conformance kit fails every mutant, at the check that is meant for it."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE))
for module in ("mutant_trainers", "mutant_optimizers", "mutant_generators"):
    importlib.import_module(module)
MUTANTS = {name: mutant.killed_by for name, mutant in importlib.import_module("mutants").MUTANTS.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """For each mutant, how many cases of its check ran and which of them failed, with the messages."""
    report = tmp_path_factory.mktemp("mutants") / "report.xml"
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", "--import-mode=prepend", "-o", "addopts=", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", str(HERE / "mutant_suite.py"), *options]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=report.parent, env=os.environ, timeout=240)
    assert finished.returncode == 1, finished.stdout[-3000:] + finished.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        assert case.find("skipped") is None, case.attrib
        assert case.find("error") is None, ElementTree.tostring(case, encoding="unicode")[:2000]
        failure = case.find("failure")
        outcome = found.setdefault(case.attrib["classname"].rpartition(".")[2], {"num_cases": 0, "failures": []})
        outcome["num_cases"] += 1
        if failure is not None:
            outcome["failures"].append(failure.attrib["message"])
    return found


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_kit_fails_the_mutant(outcomes, mutant):
    outcome = outcomes[mutant]
    assert outcome["num_cases"] > 0
    assert outcome["failures"], f"{MUTANTS[mutant]} does not notice it"


def test_mutants_fail_by_what_the_kit_checks(outcomes):
    """And not by crashing in their own code."""
    crashes = ("TypeError", "AttributeError", "NameError", "KeyError", "IndexError")
    wrong = {
        mutant: message
        for mutant, outcome in outcomes.items()
        for message in outcome["failures"]
        if message.startswith(crashes)
    }
    assert not wrong
