"""The conformance kit fails every mutant, at the check that is meant for it."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutant_outcomes import registered, run_suite, table

MUTANTS = {name: mutant.killed_by for name, mutant in registered().items()}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Those of the mutants that this session tries."""
    cases = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    return run_suite(tmp_path_factory.mktemp("mutants"), [case.callspec.params["mutant"] for case in cases])


@pytest.mark.wide(sample=12)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_kit_fails_the_mutant(outcomes, mutant):
    outcome = outcomes[mutant]
    assert outcome["num_cases"] > 0
    assert outcome["failures"], f"{MUTANTS[mutant]} does not notice it"


def test_mutants_fail_by_what_the_kit_checks(outcomes):
    """And not by crashing in their own code, here or on a rank."""
    crashes = re.compile(
        r"^(TypeError|AttributeError|NameError|KeyError|IndexError|ImportError|ModuleNotFoundError)\b", re.MULTILINE
    )
    wrong = {
        mutant: message for mutant, outcome in outcomes.items() for message in outcome["failures"] if crashes.search(message)
    }
    assert not wrong


@pytest.mark.wide  # takes all of them
def test_the_table_says_what_kills_each(outcomes):
    lines = table(outcomes)
    assert lines[-1] == f"{len(MUTANTS)} of {len(MUTANTS)} mutants of the conformance kit are killed"
    for name, line in zip(MUTANTS, lines[1:-1], strict=True):
        assert f" {MUTANTS[name]} " in line, line
