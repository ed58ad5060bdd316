"""Weights and masks of verl's rollout correction give the same loss."""

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from . import peer_verl
from .peer_verl import Batch
from .verl_batches import CORRECTION, Read, loss_of, reported


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("rollout_is: token, rollout_is_threshold: 1.1", {"level": "token", "high": 1.1}),
        ("rollout_is: sequence, rollout_is_threshold: 1.3", {"level": "sequence", "high": 1.3}),
        ("rollout_is: token, rollout_is_threshold: '0.8_1.2'", {"level": "token", "low": 0.8, "high": 1.2, "masks": True}),
        ("rollout_is: token", {"level": "token", "high": 2.0}),
        ("rollout_is: null", None),
    ],
)
def test_weights_of_the_generator_are_verls(
    read_verl: Read, verl_batch: Batch, options: str, expected: dict[str, Any] | None
) -> None:
    losses = peer_verl.policy_loss(verl_batch, "vanilla", low=0.2, high=0.3)
    weighed = losses if expected is None else losses * peer_verl.weights(verl_batch, **expected)
    found = loss_of(read_verl(f"+{CORRECTION}={{{options}}}"), verl_batch)
    assert found == pytest.approx(peer_verl.aggregate(weighed, verl_batch.mask, "token-mean", 40), rel=1e-9)
    if expected is not None:
        plain = read_verl(f"+{CORRECTION}={{{options}}}", "+actor_rollout_ref.rollout.calculate_log_probs=False")
        assert plain.values["algorithm.grpo.importance_correction"] == "none"  # verl has no probabilities to weigh by


@pytest.mark.parametrize("level", ["token", "sequence", None])
def test_bypass_mode_compares_with_the_generator(read_verl: Read, verl_batch: Batch, level: str | None) -> None:
    bypassed = evolve(verl_batch, old=verl_batch.rollout)
    clipped = read_verl(f"+{CORRECTION}={{bypass_mode: true, rollout_is: {level or 'null'}}}")
    losses = peer_verl.policy_loss(bypassed, "vanilla", low=0.2, high=0.3)
    assert loss_of(clipped, verl_batch) == pytest.approx(
        peer_verl.aggregate(losses, verl_batch.mask, "token-mean", 40), rel=1e-9
    )
    reinforce = f"bypass_mode: true, loss_type: reinforce, rollout_is: {level or 'null'}, rollout_is_threshold: 1.2"
    moved = evolve(verl_batch, old=verl_batch.policy)
    weights = 1.0 if level is None else peer_verl.weights(moved, level, high=1.2)
    expected = peer_verl.aggregate(
        -verl_batch.advantages[:, None] * verl_batch.policy * weights, verl_batch.mask, "token-mean", 40
    )
    assert loss_of(read_verl(f"+{CORRECTION}={{{reinforce}}}"), verl_batch) == pytest.approx(expected, rel=1e-9)


def test_sequences_far_from_the_generator_are_left_out_as_verl_does(read_verl: Read, verl_batch: Batch) -> None:
    found = read_verl(f"+{CORRECTION}={{rollout_rs: seq_mean_k1, rollout_rs_threshold: '0.95_1.1'}}")
    mean = ((verl_batch.rollout - verl_batch.old) * verl_batch.mask).sum(1) / verl_batch.mask.sum(1)
    kept = (mean >= np.log(0.95)) & (mean <= np.log(1.1))
    assert 0 < kept.sum() < len(kept)
    losses = peer_verl.policy_loss(verl_batch, "vanilla", low=0.2, high=0.3) * kept[:, None]
    assert loss_of(found, verl_batch) == pytest.approx(peer_verl.aggregate(losses, verl_batch.mask, "token-mean", 40), rel=1e-9)
    assert f"{CORRECTION}.rollout_rs" in reported(found)
