"""Imports verl's losses of the policy, their clip ranges and their means."""

import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlcore_import.source import Source
from rlcore_import.verl_advantages import import_advantages
from rlcore_import.verl_correction import import_correction
from rlcore_import.verl_divergence import import_divergence
from rlcore_import.verl_keys import GRPO, PPO
from rlcore_import.verl_rows import ACTOR, CORRECTION, POLICY_LOSS


@frozen(kw_only=True)
class Loss:
    """One of verl's losses of the policy."""

    objective: str
    ratio: str = "token"
    normalisation: str | None = None
    """The normalisation that the loss has whatever loss_agg_mode is; None where it follows that."""
    clips: bool = False
    """True for a loss that reads the clip range."""
    note: str = ""


CHOSEN = "tokens are chosen over the step by the sampler's probabilities, there over the microbatch by the policy's"
LOSSES: Mapping[str, Loss] = {
    "vanilla": Loss(objective="clipped", clips=True),
    "gspo": Loss(objective="clipped", ratio="sequence_token", normalisation="sequence", clips=True),
    "sapo": Loss(objective="sapo", normalisation="sequence"),
    "gpg": Loss(objective="policy_gradient"),
    "clip_cov": Loss(objective="clip_cov", clips=True, note=CHOSEN),
    "kl_cov": Loss(objective="kl_cov", note=CHOSEN),
    "geo_mean": Loss(
        objective="gmpo",
        normalisation="sequence",
        clips=True,
        note="a mean over the update, there the sum of microbatches' means",
    ),
    "cispo": Loss(objective="cispo", clips=True),
}
OPTIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "clip_cov": (
        (f"{POLICY_LOSS}.clip_cov_ratio", "covariance_share"),
        (f"{POLICY_LOSS}.clip_cov_lb", "covariance_minimum"),
        (f"{POLICY_LOSS}.clip_cov_ub", "covariance_maximum"),
    ),
    "kl_cov": ((f"{POLICY_LOSS}.kl_cov_ratio", "covariance_share"), (f"{POLICY_LOSS}.ppo_kl_coef", "covariance_penalty")),
    "sapo": ((f"{ACTOR}.tau_pos", "sapo_temperature_positive"), (f"{ACTOR}.tau_neg", "sapo_temperature_negative")),
}
"""Options of single losses: verl's key, and rlcore's option."""
AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
    "token-sum": "constant",
}


def import_algorithm(source: Source, values: dict[str, Any]) -> None:
    """Import advantages, the loss, KL terms and corrections."""
    name = source.text("algorithm.adv_estimator", "gae")
    section = PPO if name == "gae" else GRPO
    values["algorithm.name"] = section.rpartition(".")[2]
    import_advantages(source, values, name)
    _loss(source, values, section)
    import_divergence(source, values, section, name)


def _loss(source: Source, values: dict[str, Any], section: str) -> None:
    values[f"{section}.previous_logprobs"] = "trainer"
    mode = source.text(f"{POLICY_LOSS}.loss_mode", "vanilla")
    is_bypassed = source.flag(f"{CORRECTION}.bypass_mode") or mode == "bypass_mode"
    # Under bypass_mode verl's older trainer takes the clipped loss or REINFORCE; its newer one keeps the loss.
    reads_type = mode == "bypass_mode" or (is_bypassed and not source.look("trainer.use_v1"))
    if reads_type:
        mode = "vanilla"
    if section == PPO and mode != "vanilla":
        source.report(f"{POLICY_LOSS}.loss_mode", "with a critic the clipped loss is the only one")
        mode = "vanilla"
    if mode not in LOSSES:
        source.report(f"{POLICY_LOSS}.loss_mode", "no such loss: the clipped one is taken")
        mode = "vanilla"
    loss = LOSSES[mode]
    if loss.note:
        source.report(f"{POLICY_LOSS}.loss_mode", loss.note)
    if section == GRPO:
        values |= {f"{GRPO}.objective": loss.objective, f"{GRPO}.ratio": loss.ratio}
    _clip_range(source, values, section, mode)
    for of, options in OPTIONS.items():
        for theirs, ours in options:
            if of != mode:
                source.ignore(theirs)
                continue
            bounds = {"least": 0} if ours.endswith("imum") else {"above": 0, "most": 1 if ours.endswith("share") else math.inf}
            if (value := source.number(theirs, **bounds)) is not None:
                values[f"{section}.{ours}"] = value
    if mode == "clip_cov" and values.get(f"{section}.covariance_minimum", 1) >= values.get(f"{section}.covariance_maximum", 5):
        source.refuse(f"{POLICY_LOSS}.clip_cov_lb", "a number below clip_cov_ub")
    _normalisation(source, values, section, loss)
    import_correction(source, values, section, is_bypassed=is_bypassed, reads_type=reads_type)
    if coefficient := source.number(f"{ACTOR}.entropy_coeff", 0.0, least=0):
        values[f"{section}.entropy_coefficient"] = coefficient


def _clip_range(source: Source, values: dict[str, Any], section: str, mode: str) -> None:
    both = source.number(f"{ACTOR}.clip_ratio", 0.2, least=0)
    low = source.number(f"{ACTOR}.clip_ratio_low", both, least=0)
    high = source.number(f"{ACTOR}.clip_ratio_high", both, least=0)
    dual = source.number(f"{ACTOR}.clip_ratio_c", 3.0, least=1)
    if mode == "geo_mean":  # verl bounds the ratio's logarithm in this loss
        low, high = -math.expm1(-low), math.expm1(high)
    if section == PPO or LOSSES[mode].clips:
        values |= {f"{section}.clip_low": min(1.0, low), f"{section}.clip_high": high}
    if mode == "vanilla" and dual > 1:
        values[f"{section}.dual_clip"] = dual


def _normalisation(source: Source, values: dict[str, Any], section: str, loss: Loss) -> None:
    aggregation = source.text(f"{ACTOR}.loss_agg_mode", "token-mean")
    length = source.integer(f"{ACTOR}.loss_scale_factor", least=1)
    if aggregation not in AGGREGATIONS:
        source.refuse(f"{ACTOR}.loss_agg_mode", f"one of {', '.join(AGGREGATIONS)}")
    asked = AGGREGATIONS.get(aggregation, "token")
    normalisation = loss.normalisation or asked
    if loss.normalisation not in (None, asked) and (
        source.look(f"{ACTOR}.use_kl_loss") or source.look(f"{ACTOR}.entropy_coeff")
    ):
        what = "a mean over sequences for this loss; that of the terms of KL and entropy here, too"
        source.report(f"{ACTOR}.loss_agg_mode", what)
    if normalisation == "constant" and section == PPO:
        what = "with a critic the loss is a mean over sequences or tokens: sequences are taken"
        source.report(f"{ACTOR}.loss_agg_mode", what)
        normalisation = "sequence"
    values[f"{section}.loss_normalisation"] = normalisation
    if normalisation != "constant":
        return
    if aggregation == "token-sum":
        source.report(f"{ACTOR}.loss_agg_mode", "the sum over tokens is divided by the sequences of an update")
    if aggregation == "seq-mean-token-sum-norm":
        values |= {} if length is None else {f"{section}.constant_length": length}
        if length is None and source.look("trainer.use_v1"):
            what = "divided by rollout.max_response_tokens, where there by the longest answer of each microbatch"
            source.report(f"{ACTOR}.loss_agg_mode", what)
    else:
        values[f"{section}.constant_length"] = 1
