"""docs/plan.md has the present predictions, and they are near what was measured."""

import pytest
from attrs import evolve
from measured_plans import MEASURED
from plan_document import DOCUMENT, KINDS, LARGE, large_row, large_rows, with_measured


def test_the_page_is_current():
    page = DOCUMENT.read_text()
    assert with_measured(page) == page, "run `make docs`"
    assert len(large_rows(page)) == len(LARGE) * len(KINDS), "run `make docs`"


@pytest.mark.wide(keep=["H100-Llama-3.3-70B", "H200-Qwen3-235B-A22B", "GB200-DeepSeek-V3"])  # a plan takes seconds
@pytest.mark.parametrize("model", LARGE, ids=lambda model: model.name)
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_for_large_models_are_current(model, kind):
    place = LARGE.index(model) * len(KINDS) + KINDS.index(kind)
    assert large_rows(DOCUMENT.read_text())[place] == large_row(model, kind), "run `make docs`"


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
