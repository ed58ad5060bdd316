"""The table of docs/compare.md is what the numbers of TRL give, and the page's adapter can be called."""

import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore_bundles.compare_command import lines_of
from rlcore_bundles.peer_comparison import compare_terms
from rlcore_bundles.peer_process import Called

from .peer_cases import batch_of_case, options_of
from .test_peers import FROZEN, frozen_terms

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"
CASE = "grpo with KL"


def table() -> str:
    """The output for the page's example."""
    record, batch = FROZEN["trl"]["cases"][CASE], batch_of_case(CASE)
    called = Called(
        version=FROZEN["trl"]["version"],
        functions=[],
        settings=record["settings"],
        unmapped=record["unmapped"],
        terms=frozen_terms(record),
        reasons=record["reasons"],
        failures={},
    )
    return "\n".join(lines_of(compare_terms(batch, called.terms, called.reasons), called, batch))


def plain(text: str) -> str:
    """The text without the rounding of terms that agree, which follows from the processor."""
    return re.sub(r"(?m) +\S+ +\S+  (equal|rounding)$", " agrees", text)


def test_the_pages_table_is_the_commands_output() -> None:
    assert plain(table()) in plain(PAGE.read_text())


def test_the_options_that_the_page_names_make_every_term_equal() -> None:
    record = FROZEN["trl"]["cases"][CASE]
    batch = batch_of_case(CASE)
    batch = evolve(batch, own=batch.own.with_options(advantage_epsilon=1e-4, kl_gradient="estimate"))
    rows = compare_terms(batch, frozen_terms(record), record["reasons"])
    assert {row.verdict for row in rows} <= {"equal", "rounding"}, rows


def test_the_pages_adapter_returns_a_peer() -> None:
    program = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(compile(program, "adapter.py", "exec"), names)
    batch = batch_of_case("grpo")
    peer = names["peer"](batch.setup)
    assert peer.settings == {"clip": options_of("grpo")["clip_high"]}
    assert batch.own.samples is not None
    assert batch.own.update is not None
    assert peer.advantages(batch.own.samples).shape == batch.own.samples.rewards.shape
    value, metrics = peer.loss(batch.own.update)
    assert metrics["acme/loss"] == pytest.approx(float(value))
