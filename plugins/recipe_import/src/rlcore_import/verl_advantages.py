"""Imports verl's estimators of advantages, and the critic of `gae`."""

import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlcore_import.source import Source
from rlcore_import.verl_keys import GRPO, LIKE_THE_POLICY, PPO
from rlcore_import.verl_rows import ACTOR, ROLLOUT


@frozen
class Estimator:
    """One of verl's estimators of advantages."""

    baseline: str
    normalisation: str
    note: str = ""
    """Difference of rlcore's algorithm."""


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator("group_mean", "std"),
    "grpo_vectorized": Estimator("group_mean", "std"),
    "rloo": Estimator("leave_one_out", "none"),
    "rloo_vectorized": Estimator("leave_one_out", "none"),
    "reinforce_plus_plus": Estimator("none", "batch_whitening"),
    "reinforce_plus_plus_baseline": Estimator("group_mean", "batch_whitening"),
    "gdpo": Estimator("group_mean", "std", "advantages are divided over the samples of the step, there over its tokens"),
    "gpg": Estimator("group_mean", "none", "advantages are not multiplied by samples / samples of a reward other than 0"),
}
"""verl's estimators with counterparts in GRPO; `gae` is PPO's."""
BY_STD = ("grpo", "grpo_vectorized", "gdpo")
"""Estimators that read `norm_adv_by_std_in_grpo`."""


def import_advantages(source: Source, values: dict[str, Any], name: str) -> None:
    if name == "gae":
        _critic(source, values)
        source.ignore("algorithm.norm_adv_by_std_in_grpo", "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights")
        return
    source.ignore("critic")
    if name not in ESTIMATORS:
        source.report("algorithm.adv_estimator", "no such estimator of advantages: that of GRPO is taken")
    estimator = ESTIMATORS.get(name, ESTIMATORS["grpo"])
    if estimator.note:
        source.report("algorithm.adv_estimator", estimator.note)
    by_std = source.flag("algorithm.norm_adv_by_std_in_grpo", default=True)
    baseline, normalisation = estimator.baseline, estimator.normalisation
    if name in BY_STD and not by_std:
        normalisation = "none"
    if values["rollout.samples_per_prompt"] == 1 and baseline != "none":
        # verl takes mean 0 and deviation 1 for a group of one.
        baseline, normalisation = "none", normalisation if normalisation == "batch_whitening" else "none"
        source.report(f"{ROLLOUT}.n", "an answer is compared with nothing, as the only one of its group there")
    values |= {f"{GRPO}.advantage_baseline": baseline, f"{GRPO}.advantage_normalisation": normalisation}
    source.ignore("algorithm.lam")
    if source.number("algorithm.gamma", 1.0) != 1 and name == "reinforce_plus_plus":
        source.report("algorithm.gamma", "nothing is discounted without a critic")
    if source.integer("trainer.critic_warmup", 0) > 1:
        source.report("trainer.critic_warmup", "the policy trains from the first step where there is no critic")
    _components(source, values, name)


def _components(source: Source, values: dict[str, Any], name: str) -> None:
    """Import the components of GDPO's reward."""
    parts, weights = source.take("algorithm.gdpo_reward_keys", []), source.take("algorithm.gdpo_reward_weights", [])
    if name != "gdpo" or values["rollout.samples_per_prompt"] == 1:
        return
    if values[f"{GRPO}.advantage_normalisation"] == "none":
        source.report("algorithm.norm_adv_by_std_in_grpo", "parts of a reward are divided by their groups' deviation")
        values[f"{GRPO}.advantage_normalisation"] = "std"
    values[f"{GRPO}.reward_aggregation"] = "normalise_then_sum"
    for part, weight in zip(list(parts), list(weights or []), strict=False):
        values[f"{GRPO}.reward_weights.{part}"] = float(weight)
        if not math.isfinite(float(weight)):
            source.refuse("algorithm.gdpo_reward_weights", "finite numbers")


def _critic(source: Source, values: dict[str, Any]) -> None:
    values[f"{PPO}.gamma"] = source.number("algorithm.gamma", 1.0, above=0, most=1)
    values[f"{PPO}.gae_lambda"] = source.number("algorithm.lam", 1.0, least=0, most=1)
    values["critic.learning_rate"] = source.number("critic.optim.lr", 1e-5, above=0)
    values["critic.weight_decay"] = source.number("critic.optim.weight_decay", 0.01, least=0)
    values["critic.max_grad_norm"] = source.number("critic.optim.clip_grad", source.number("critic.grad_clip", 1.0, least=0))
    if (steps := source.integer("trainer.critic_warmup", 0)) > 1:
        values["critic.warmup_steps"] = steps - 1  # verl counts steps from 1: its policy trains from this step on
        if steps > values["run.num_steps"]:
            source.refuse(
                "trainer.critic_warmup", f"at most the run's {values['run.num_steps']} steps, for the policy to train"
            )
    path = source.text("critic.model.path")
    if path and path != values["model.path"]:
        values["critic.path"] = path
    values[f"{PPO}.value_clip"] = source.number("critic.cliprange_value", 0.5, above=0, infinite=True)
    if source.text("critic.loss_agg_mode", str(source.look(f"{ACTOR}.loss_agg_mode") or "token-mean")) != "token-mean":
        source.report("critic.loss_agg_mode", "the critic's loss is the mean over tokens")
    size = source.take("critic.ppo_mini_batch_size")
    if size is not None and size != source.look(f"{ACTOR}.ppo_mini_batch_size"):
        source.report("critic.ppo_mini_batch_size", "the critic makes as many updates as the policy")
    epochs = values["training.epochs_per_step"]
    if source.integer("critic.ppo_epochs", epochs, least=1) != epochs:
        source.report("critic.ppo_epochs", f"the critic makes the policy's passes over a step's samples: {epochs}")
    for name, default in LIKE_THE_POLICY.items():
        own, policys = source.take(f"critic.optim.{name}"), source.look(f"{ACTOR}.optim.{name}")
        if (default if own is None else own) != (default if policys is None else policys):
            source.report(f"critic.optim.{name}", "the critic has the policy's schedule and moments")
