"""Each convention is found where the other side has it, and is named for what it is."""

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from rlcore_bundles.compared_batch import ComparedBatch, as_dtype
from rlcore_bundles.conventions import conventions_of
from rlcore_bundles.own_side import OwnSide
from rlcore_bundles.peer_comparison import PeerTerms, Terms, compare_terms

from .peer_cases import CASES, batch_of_case

METRICS = ("clip_fraction", "kl")


def peer_terms(side: OwnSide) -> PeerTerms:
    """Return the answer of a framework that computes as a side does."""
    own = Terms(side)
    numbers = {name: own.numbers(name) for name in own.names}
    found = as_dtype(side, torch.float64)
    wide = {name: Terms(found).numbers(name).values for name in own.names}
    assert side.update is not None
    metrics = side.loss(side.update)[1]
    return PeerTerms(
        terms={name: one.values.astype(np.float32) for name, one in numbers.items()},
        wide=wide,
        metrics={f"their/{name}": metrics[name] for name in METRICS if name in metrics},
        metric_names={f"their/{name}": name for name in METRICS},
    )


def _known() -> list[tuple[str, int, str]]:
    """Every convention of every case."""
    found = []
    for name in CASES:
        batch = batch_of_case(name)
        found += [(name, number, one.text) for number, one in enumerate(conventions_of(batch.own, 5))]
    return found


KNOWN = _known()


@pytest.mark.parametrize("name", CASES)
def test_a_side_is_equal_to_itself(name: str) -> None:
    batch = batch_of_case(name)
    rows = compare_terms(batch, peer_terms(batch.own), {})
    assert {row.verdict for row in rows} == {"equal"}, rows
    assert len(rows) > 6


@pytest.mark.wide
@pytest.mark.parametrize(("name", "number", "text"), KNOWN, ids=[f"{name}: {text}" for name, _, text in KNOWN])
def test_a_convention_of_the_other_side_explains_every_difference(name: str, number: int, text: str) -> None:
    batch = batch_of_case(name)
    theirs = [*conventions_of(batch.own, 5)][number].apply(batch.own)
    rows = compare_terms(batch, peer_terms(theirs), {})
    assert all(row.is_explained for row in rows), [row for row in rows if not row.is_explained]
    named = {one for row in rows for one in row.conventions}
    # Some conventions are the same on this step, such as a bound that no number reaches.
    assert text in named or len(named) <= 1


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("grpo", {"std_correction": 0}, "the standard deviation divides by n, here by n - 1"),
        ("grpo", {"advantage_epsilon": 1e-4}, "advantage_epsilon = 0.0001, here 1e-06"),
        ("grpo", {"advantage_baseline": "leave_one_out"}, 'advantage_baseline = "leave_one_out", here "group_mean"'),
        ("grpo", {"loss_normalisation": "sequence"}, 'loss_normalisation = "sequence", here "token"'),
        ("grpo", {"masks_truncated": True}, "truncated samples are masked, here they train"),
        ("grpo", {"dual_clip": 3.0}, "dual_clip = 3, here none"),
        ("grpo", {"importance_correction": "none"}, 'importance_correction = "none", here "token"'),
        ("grpo", {"current_is_previous": True}, "the policy's own log-probabilities are the old ones, here the step's"),
        ("grpo", {"ratio": "sequence"}, 'ratio = "sequence", here "token"'),
        ("grpo with KL", {"kl_estimator": "k2"}, 'kl_estimator = "k2", here "k3"'),
        ("grpo with KL", {"kl_gradient": "estimate"}, 'kl_gradient = "estimate", here "expectation"'),
        ("grpo with KL", {"kl_coefficient": 0.05}, "kl_coefficient = 0.05, here 0.1"),
        ("entropy", {"entropy_by_token": True}, "the entropy bonus is a mean over tokens, here that of the loss"),
        ("grpo", {"weight_factor": 0.5}, "tokens weigh 0.5 times what they do here"),
        ("rloo", {"ratio": "token"}, 'ratio = "token", here "sequence_product"'),
        ("gspo", {"ratio": "token", "clip_low": 3e-4}, 'ratio = "token", here "sequence"'),
    ],
    ids=lambda one: str(one) if isinstance(one, str | dict) else "",
)
def test_the_convention_is_named(name: str, changes: dict[str, Any], named: str) -> None:
    batch = batch_of_case(name)
    rows = compare_terms(batch, peer_terms(_changed(batch, changes)), {})
    assert named in {one for row in rows for one in row.conventions}, rows


def _changed(batch: ComparedBatch, changes: dict[str, Any]) -> OwnSide:
    options = {key: value for key, value in changes.items() if key in batch.own.options}
    fields = {key: value for key, value in changes.items() if key not in options}
    own = evolve(batch.own, **fields)
    own = evolve(own, recorded=None) if "std_correction" in fields else own
    return own.with_options(**options)


def test_two_conventions_together_are_found() -> None:
    batch = batch_of_case("grpo")
    theirs = _changed(batch, {"std_correction": 0, "advantage_epsilon": 1e-4})
    row = compare_terms(batch, peer_terms(theirs), {})[0]
    assert row.conventions == ("advantage_epsilon = 0.0001, here 1e-06", "the standard deviation divides by n, here by n - 1")


def test_a_difference_without_a_name_has_its_greatest_token() -> None:
    batch = batch_of_case("grpo")
    theirs = peer_terms(batch.own)
    changed = theirs.terms["policy loss"].copy()
    changed[5] += 0.25
    other = evolve(theirs, terms={**theirs.terms, "policy loss": changed}, wide={**theirs.wide, "policy loss": changed})
    row = next(one for one in compare_terms(batch, other, {}) if one.quantity == "policy loss")
    assert (row.verdict, row.is_explained, row.conventions) == ("differs", False, ())
    assert row.where.startswith("sample 1, token 3: rlcore ")
    assert row.difference == pytest.approx(0.25, rel=1e-4)


def test_a_missing_part_has_its_reason() -> None:
    batch = batch_of_case("grpo")
    empty = PeerTerms(terms={}, wide={})
    rows = compare_terms(batch, empty, {"advantages": "no estimator", "loss": "no loss"})
    assert [(row.quantity, row.verdict, row.reason) for row in rows] == [
        ("advantages", "not compared", "no estimator"),
        ("loss", "not compared", "no loss"),
    ]


def test_whitening_of_samples_is_the_formula() -> None:
    own = batch_of_case(next(iter(CASES))).own
    assert own.samples is not None
    side = own.with_options(advantage_normalisation="sample_whitening", advantage_baseline="none", advantage_epsilon=1e-6)
    found = evolve(side, recorded=None).advantages().numpy()
    rewards, mask = own.samples.rewards.double().numpy(), own.samples.mask.numpy()
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected[:, None] * mask, rtol=1e-6)
