"""rlcore beside the code of TRL and verl: their numbers as they were computed once, and as an installed one computes them.

tests/bundles/data/peer_numbers.json has the numbers, with the versions that computed them. It is written again by
RLCORE_UPDATE_PEERS=1 python -m pytest tests/bundles/test_peers.py, with RLCORE_TEST_TRL and RLCORE_TEST_VERL naming the
environments in which the frameworks are installed.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore_bundles.peer_comparison import PeerTerms, TermRow, compare_terms
from rlcore_bundles.peer_process import Called, call_adapter

from .peer_cases import CASES, batch_of_case

FILE = Path(__file__).with_name("data") / "peer_numbers.json"
FROZEN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
PEERS = ("trl", "verl")
LIVE = ("grpo with KL", "gspo", "rloo")
"""The cases that a test calls an installed framework with; a call imports it, which takes long."""
EPSILON = ("advantage_epsilon = 0.0001, here 1e-06",)
ESTIMATE = 'kl_gradient = "estimate", here "expectation"'
DUAL = "dual_clip = 3, here none"
OF_DUAL = dict.fromkeys(
    ("policy loss", "policy loss, sum", "loss", "gradient", "dual_clip_fraction (actor/pg_clipfrac_lower)"), (DUAL,)
)
BY_SEQUENCE = ("metrics are means over sequences, here over tokens",)
BY_TOKEN = ("the entropy bonus is a mean over tokens, here that of the loss",)
EXPECTED: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "trl": {
        **{key: {"advantages": EPSILON} for key in ("grpo", "grpo by sequence", "dapo", "gspo", "cispo", "sapo")},
        "grpo with KL": {"advantages": EPSILON, "gradient": (ESTIMATE,)},
        "dr_grpo": {},
        "entropy": {"advantages": EPSILON, "entropy weights": BY_TOKEN},
        "rloo": {
            "clip_fraction (clip_ratio/region_mean)": BY_SEQUENCE,
            "clip_fraction_low (clip_ratio/low_mean)": BY_SEQUENCE,
            "clip_fraction_high (clip_ratio/high_mean)": BY_SEQUENCE,
        },
    },
    "verl": {
        **dict.fromkeys(("grpo", "grpo by sequence", "dr_grpo", "entropy"), OF_DUAL),
        "grpo with KL": {**OF_DUAL, "gradient": (DUAL, ESTIMATE)},
        **{key: {} for key in ("dapo", "gspo", "rloo", "cispo", "sapo")},
    },
}
"""The conventions of each term that differs."""


def environment(peer: str) -> Path | None:
    """The environment that has a framework; skips where none has."""
    if (named := os.environ.get(f"RLCORE_TEST_{peer.upper()}")) is not None:
        return Path(named)
    if importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed, and RLCORE_TEST_{peer.upper()} names no environment that has it")
    return None


def checkout(peer: str) -> Path:
    """The sources of a framework; skips where none are named."""
    name = f"RLCORE_TEST_{peer.upper()}_CHECKOUT"
    if (named := os.environ.get(name)) is None:
        pytest.skip(f"{name} names no sources of {peer}")
    return Path(named)


def as_record(called: Called) -> dict[str, Any]:
    """The numbers of a framework as JSON holds them."""
    terms = called.terms
    return {
        "terms": {name: [float(f"{one:.9g}") for one in column] for name, column in terms.terms.items()},
        "wide": {name: [float(f"{one:.12g}") for one in column] for name, column in terms.wide.items()},
        "metrics": {name: float(f"{terms.metrics[name]:.9g}") for name in terms.metric_names if name in terms.metrics},
        "metric_names": dict(terms.metric_names),
        "reasons": dict(called.reasons),
        "settings": dict(called.settings),
        "unmapped": list(called.unmapped),
    }


def frozen_terms(record: dict[str, Any]) -> PeerTerms:
    """The numbers of a record."""
    return PeerTerms(
        terms={name: np.array(column, np.float32) for name, column in record["terms"].items()},
        wide={name: np.array(column, np.float64) for name, column in record["wide"].items()},
        metrics=record["metrics"],
        metric_names=record["metric_names"],
    )


def conventions(rows: list[TermRow]) -> dict[str, tuple[str, ...]]:
    """The conventions of each term that differs."""
    return {row.quantity: tuple(row.conventions) for row in rows if row.verdict == "differs"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("peer", PEERS)
def test_every_difference_from_the_frameworks_numbers_has_a_name(peer: str, name: str) -> None:
    record = FROZEN[peer]["cases"][name]
    rows = compare_terms(batch_of_case(name), frozen_terms(record), record["reasons"])
    assert conventions(rows) == EXPECTED[peer][name], rows
    is_equal = sum(row.verdict in ("equal", "rounding") for row in rows)
    assert is_equal >= (1 if "loss" in record["reasons"] else 5)


@pytest.mark.wide
@pytest.mark.parametrize("peer", PEERS)
def test_an_installed_framework_computes_these_numbers(peer: str) -> None:
    python = environment(peer)
    updates = bool(os.environ.get("RLCORE_UPDATE_PEERS"))
    found = {name: call_adapter(peer, batch_of_case(name), {}, python=python) for name in (CASES if updates else LIVE)}
    assert not [one.failures for one in found.values() if one.failures]
    version = next(iter(found.values())).version
    records = {name: as_record(called) for name, called in found.items()}
    if updates:
        FILE.parent.mkdir(exist_ok=True)
        written = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps({**written, peer: {"version": version, "cases": records}}, separators=(",", ":")) + "\n")
        return
    for name, record in records.items():
        frozen = FROZEN[peer]["cases"][name]
        assert record["terms"].keys() == frozen["terms"].keys()
        for term, column in record["terms"].items():
            np.testing.assert_allclose(
                column, frozen["terms"][term], rtol=1e-5, atol=1e-6, err_msg=f"{version}, {name}: {term}"
            )
        assert record["reasons"] == frozen["reasons"]


ADDED = "0.001 times the squared log ratio to the generator is added, here nothing"
OF_SOURCES: dict[str, set[str]] = {
    "nemo_rl": set(),
    "slime": {ESTIMATE},
    "prime_rl": {
        "no clip of the ratio, here one",
        "kl_coefficient = 0, here 0.1",
        'previous_logprobs = "generation", here "trainer"',
        ADDED,
        "tokens whose probability moved by more than 0.2 are masked, here the ratio is clipped",
    },
}
"""The conventions that may differ on GRPO with a KL term."""


@pytest.mark.wide
@pytest.mark.parametrize("peer", OF_SOURCES)
def test_a_framework_of_sources_differs_by_named_conventions_alone(peer: str) -> None:
    sources, python = checkout(peer), Path(os.environ[f"RLCORE_TEST_{peer.upper()}"])
    batch = batch_of_case("grpo with KL")
    called = call_adapter(peer.replace("_", "-"), batch, {}, python=python, checkout=sources)
    rows = compare_terms(batch, called.terms, called.reasons)
    assert not called.failures
    assert all(row.is_explained for row in rows), rows
    assert {one for row in rows for one in row.conventions} <= OF_SOURCES[peer], rows
    assert {"token weights", "log ratio", "policy loss", "gradient"} <= {row.quantity for row in rows}
