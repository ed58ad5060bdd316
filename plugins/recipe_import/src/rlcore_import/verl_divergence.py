"""Imports verl's KL terms of the loss and of the reward."""

from typing import Any

from rlcore_import.source import Source
from rlcore_import.verl_keys import GRPO, PPO
from rlcore_import.verl_rows import ACTOR

SUMS_REWARDS = "the sum of the episode's estimates is taken off its reward there"
OF_GENERATOR = "of the generator's log-probabilities, whose numerics are others than the trainer's"
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def import_divergence(source: Source, values: dict[str, Any], section: str, estimator: str) -> None:
    in_loss, in_reward = source.flag(f"{ACTOR}.use_kl_loss"), source.flag("algorithm.use_kl_in_reward")
    kinds = source.text(f"{ACTOR}.kl_loss_type", "low_var_kl"), source.text("algorithm.kl_penalty", "kl")
    weights = source.number(f"{ACTOR}.kl_loss_coef", 0.001, least=0), source.number("algorithm.kl_ctrl.kl_coef", 0.001, least=0)
    if source.text("algorithm.kl_ctrl.type", "fixed") != "fixed" and in_reward:
        source.report("algorithm.kl_ctrl.type", "the coefficient is fixed")
    in_loss, in_reward = in_loss and bool(weights[0]), in_reward and bool(weights[1])
    if not (in_loss or in_reward):
        return
    if in_loss and in_reward:
        source.report("algorithm.use_kl_in_reward", "the divergence counts once: in the loss")
    key, kind, weight = (
        (f"{ACTOR}.kl_loss_type", kinds[0], weights[0]) if in_loss else ("algorithm.kl_penalty", kinds[1], weights[1])
    )
    kl = KL_TYPES.get(kind.removesuffix("+"))
    if kl is None:
        source.report(key, "no such estimator: k3 is taken")
    values |= {f"{section}.kl_coefficient": weight, f"{section}.kl_estimator": kl or "k3"}
    if section == PPO:
        if in_loss:
            source.report(f"{ACTOR}.use_kl_loss", "with a critic the divergence is taken off the rewards of tokens")
    elif in_loss:
        _in_loss(source, values, kind, key)
    else:
        _in_reward(source, values, estimator)


def _in_loss(source: Source, values: dict[str, Any], kind: str, key: str) -> None:
    values[f"{GRPO}.kl_gradient"] = "estimate"
    if not kind.endswith("+"):
        return
    # k2's gradient is that of k1's expectation; with the sign + verl gives it to every estimate.
    values[f"{GRPO}.kl_estimator"] = "k2"
    source.report(key, "the value that is reported is k2's; the gradient is the same", changes_meaning=False)


def _in_reward(source: Source, values: dict[str, Any], estimator: str) -> None:
    of_sequence = values[f"{GRPO}.objective"] == "gmpo" or values[f"{GRPO}.ratio"] == "sequence_product"
    if values.get(f"{GRPO}.reward_aggregation") == "normalise_then_sum":
        source.report("algorithm.use_kl_in_reward", "a term of the loss: GDPO compares the parts of rewards there as well")
    elif values[f"{GRPO}.advantage_normalisation"] == "none":
        values[f"{GRPO}.kl_placement"] = "reward"
    elif of_sequence:
        source.report("algorithm.use_kl_in_reward", f"a term of the loss: {SUMS_REWARDS}")
    else:
        values[f"{GRPO}.kl_placement"] = "reward_to_go"
        if estimator != "reinforce_plus_plus":
            what = f"an advantage loses the estimates from its token on: {SUMS_REWARDS}, before rewards are compared"
            source.report("algorithm.use_kl_in_reward", what)
    if f"{GRPO}.kl_placement" in values:
        source.report("algorithm.kl_penalty", OF_GENERATOR, changes_meaning=False)
