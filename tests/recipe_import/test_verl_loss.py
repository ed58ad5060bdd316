"""The loss of a batch has the value of verl's formula, for each loss, mean and clip range."""

import numpy as np
import pytest

from . import peer_verl
from .peer_verl import Batch
from .verl_batches import ACTOR, AGGREGATIONS, CORRECTION, LOSS, Read, loss_of, reported


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"])
def test_the_loss_is_verls(read_verl: Read, verl_batch: Batch, mode: str, aggregation: str) -> None:
    chosen = verl_batch.mask & (np.arange(9) % 3 == 1) if mode in ("clip_cov", "kl_cov") else None
    overrides = [f"{LOSS}.loss_mode={mode}", f"{ACTOR}.loss_agg_mode={aggregation}", f"{LOSS}.ppo_kl_coef=0.1"]
    losses = peer_verl.policy_loss(verl_batch, mode, low=0.2, high=0.3, chosen=chosen)
    counts = "seq-mean-token-mean" if mode in ("gspo", "sapo", "geo_mean") else aggregation
    expected = peer_verl.aggregate(losses, verl_batch.mask, counts, 40)
    assert loss_of(read_verl(*overrides), verl_batch, chosen) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("clip_ratio=0.1", {"low": 0.2, "high": 0.3}),  # the two others are set, and count
        ("clip_ratio_low=0.05", {"low": 0.05, "high": 0.3}),
        ("clip_ratio_high=0.6", {"low": 0.2, "high": 0.6}),
        ("clip_ratio_c=1.2", {"low": 0.2, "high": 0.3, "dual": 1.2}),
    ],
)
def test_clip_ranges_are_verls(read_verl: Read, verl_batch: Batch, override: str, expected: dict[str, float]) -> None:
    losses = peer_verl.policy_loss(verl_batch, "vanilla", **expected)  # type: ignore[arg-type]
    found = loss_of(read_verl(f"{ACTOR}.{override}"), verl_batch)
    assert found == pytest.approx(peer_verl.aggregate(losses, verl_batch.mask, "token-mean", 40), rel=1e-9)


@pytest.mark.parametrize(
    ("scale", "is_newer", "is_reported"), [("null", True, True), ("null", False, False), ("64", True, False)]
)
def test_a_sum_that_the_newer_trainer_divides_by_each_microbatchs_longest_answer_is_reported(
    read_verl: Read, scale: str, is_newer: bool, is_reported: bool
) -> None:
    overrides = [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"++{ACTOR}.loss_scale_factor={scale}"]
    assert (f"{ACTOR}.loss_agg_mode" in reported(read_verl(*overrides, f"++trainer.use_v1={is_newer}"))) is is_reported


def test_one_clip_range_counts_where_the_others_are_not_set(read_verl: Read, verl_batch: Batch) -> None:
    found = read_verl(f"{ACTOR}.clip_ratio=0.1", f"~{ACTOR}.clip_ratio_low", f"~{ACTOR}.clip_ratio_high")
    losses = peer_verl.policy_loss(verl_batch, "vanilla", low=0.1, high=0.1)
    assert loss_of(found, verl_batch) == pytest.approx(peer_verl.aggregate(losses, verl_batch.mask, "token-mean", 40), rel=1e-9)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.adv_estimator=remax",
        "algorithm.adv_estimator=gpg",
        "algorithm.adv_estimator=grpo_passk",
        f"{LOSS}.loss_mode=dro",
        f"{LOSS}.loss_mode=dppo_tv",
        f"{LOSS}.loss_mode=clip_cov",
        f"{LOSS}.loss_mode=geo_mean",
        f"{ACTOR}.loss_agg_mode=token-sum",
        f"+{CORRECTION}={{rollout_rs: token_k2, rollout_rs_threshold: 2.0}}",
        f"+{CORRECTION}={{rollout_is: geometric}}",
        "algorithm.gamma=0.9",
    ],
)
def test_what_is_not_the_same_is_reported(read_verl: Read, override: str) -> None:
    others = ["algorithm.adv_estimator=reinforce_plus_plus", "+algorithm.gamma=0.9"] if "gamma" in override else [override]
    key = override.lstrip("+").split("=")[0]
    assert any(one == key or one.startswith(f"{key}.") for one in reported(read_verl(*others)))
