"""Runs every mutant's check, in one process of its own. As a script, prints who is killed by what; `make mutants` calls it."""

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
MODULES = (
    "mutant_trainers",
    "mutant_optimizers",
    "mutant_split_steps",
    "mutant_gradient_norms",
    "mutant_ranks",
    "mutant_generators",
    "mutant_adapters",
    "mutant_algorithms",
    "mutant_environments",
    "mutant_sinks",
    "mutant_channels",
    "mutant_executions",
    "mutant_collectors",
    "mutant_loop_observers",
    "mutant_texts",
)


def registered():
    """Each mutant's class by the name of its test class."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    for module in MODULES:
        importlib.import_module(module)
    return importlib.import_module("mutants").MUTANTS


def run_suite(directory, names=()):
    """For each mutant, or those of these names, how many cases of its check ran and which of them failed, with the messages."""
    report = directory / "report.xml"
    options = [
        "-q",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "--import-mode=prepend",
        "-o",
        "addopts=",
        f"--junitxml={report}",
    ]
    suite = str(HERE / "mutant_suite.py")
    command = [sys.executable, "-m", "pytest", *([f"{suite}::{name}" for name in names] or [suite]), *options]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=os.environ, timeout=500)
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


def table(outcomes):
    """A line a mutant: where it lies, its name, the check that kills it, and in how many of its cases; the last line counts."""
    rows, num_killed = [("mutants of", "mutant", "killed by", "cases")], 0
    for name, mutant in registered().items():
        failed, cases = len(outcomes[name]["failures"]), outcomes[name]["num_cases"]
        kind = mutant.__module__.removeprefix("mutant_")
        rows.append((kind, mutant.__name__, mutant.killed_by if failed else "NOTHING", f"{failed} of {cases}"))
        num_killed += failed > 0
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"{num_killed} of {len(rows) - 1} mutants of the conformance kit are killed"]


def main():
    """Print the table; fails where a mutant lives."""
    with tempfile.TemporaryDirectory() as directory:
        outcomes = run_suite(Path(directory))
    print("\n".join(table(outcomes)))
    return int(any(not outcome["failures"] for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
