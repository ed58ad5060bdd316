"""Faults are planted into lines that are there: whoever changes such a line is told at once, and not by the long run."""

import pytest
from tests.mutants.faults import FAULTS, Fault
from tests.mutants.planting import source_with


@pytest.mark.parametrize("module", sorted({fault.module for fault in FAULTS}))
def test_each_fault_has_its_line(module: str) -> None:
    planted: list[Fault] = [fault for fault in FAULTS if fault.module == module]
    sources = {source_with(module, fault.line, fault.planted) for fault in planted}
    assert len(sources) == len(planted), "two faults are the same"
