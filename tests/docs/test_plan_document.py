"""docs/plan.md has the present predictions, and they are near what was measured."""

import pytest
from attrs import evolve
from measured_plans import MEASURED
from plan_document import DOCUMENT, written


def test_the_page_is_current():
    page = DOCUMENT.read_text()
    assert written(page) == page, "run `make docs`"


def test_predictions_are_near_what_was_measured():
    """Seconds within 25%, memory within 10%."""
    assert len({(row.shape, row.gpus, str(row.config)) for row in MEASURED}) >= 6
    for row in MEASURED:
        seconds, size = row.predicted()
        assert seconds == pytest.approx(row.step_s, rel=0.25), row.name
        assert row.peak_gb is None or size == pytest.approx(row.peak_gb, rel=0.10), row.name


def test_a_plan_of_the_whole_step_is_shorter_by_generation_alone():
    """Of the very layout that was measured, through trainer, engine and placement."""
    ahead = [row for row in MEASURED if row.max_staleness and row.shape == "8b"]
    assert ahead
    for row in ahead:
        saved = evolve(row, max_staleness=0).predicted()[0] - row.predicted()[0]
        assert 4.0 < saved < 22.4 / 2, row.name
