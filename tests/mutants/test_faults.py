"""Every fault between the parts is found by a test. `make mutants` prints the table."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .faults import FAULTS, Fault
from .planting import Server, serving, source_with


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


def named(fault: Fault) -> str:
    return fault.name.replace(" ", "-")


@pytest.mark.wide(sample=2)
@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_fault_between_the_parts_is_found(fault: Fault, server: Server, tmp_path: Path) -> None:
    outcome = server.judge(fault.module, fault.line, fault.planted, fault.killer, tmp_path)
    assert outcome.verdict == "killed", f"{fault.killer} {outcome.verdict}:\n{outcome.output[-3000:]}"


def test_what_changes_nothing_survives(server: Server, tmp_path: Path) -> None:
    """So the table does not count what fails for another reason."""
    fault = FAULTS[0]
    outcome = server.judge(fault.module, fault.line, f"{fault.line}  # the same", fault.killer, tmp_path)
    assert outcome.verdict == "survived", outcome.output[-3000:]


def test_a_line_that_is_gone_is_said() -> None:
    with pytest.raises(ValueError, match="0 times .* 'no such line'"):
        source_with(FAULTS[0].module, "no such line", "")
