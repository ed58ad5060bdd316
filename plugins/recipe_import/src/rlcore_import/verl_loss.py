"""What verl trains by: its estimators of advantages, losses, KL terms and corrections, and distillation."""

import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlcore_import.source import Source
from rlcore_import.verl_keys import ACTOR, CORRECTION, POLICY_LOSS, ROLLOUT

GRPO, PPO = "algorithm.grpo", "algorithm.ppo"


@frozen
class Estimator:
    """One of verl's estimators of advantages."""

    baseline: str
    normalisation: str
    note: str = ""
    """In what the algorithm differs here."""


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
"""All but `gae`, which is PPO."""
BY_STD = ("grpo", "grpo_vectorized", "gdpo")
"""Estimators that `norm_adv_by_std_in_grpo` counts for."""
SUMS_REWARDS = "the sum of the episode's estimates is taken off its reward there"


@frozen(kw_only=True)
class Loss:
    """One of verl's losses of the policy."""

    objective: str
    ratio: str = "token"
    normalisation: str | None = None
    """What stands in place of loss_agg_mode."""
    clips: bool = False
    """Whether the clip range is read."""
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
"""Options that one loss alone reads."""
AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
    "token-sum": "constant",
}
LIKE_THE_POLICY = (
    "lr_warmup_steps lr_warmup_steps_ratio lr_scheduler_type lr_decay_style warmup_style decay_type min_lr_ratio min_lr lr_min "
    "min_lr_factor lr_decay_steps betas eps"
)
"""What of a critic's optimizer is the policy's here."""
TEACHERS = "distillation.teacher_models"
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def import_algorithm(source: Source, values: dict[str, Any]) -> None:
    """Advantages, loss, KL terms and corrections."""
    name = source.text("algorithm.adv_estimator", "gae")
    section = PPO if name == "gae" else GRPO
    values["algorithm.name"] = section.rpartition(".")[2]
    _advantages(source, values, name)
    _loss(source, values, section)
    _divergence(source, values, section, name)


def _advantages(source: Source, values: dict[str, Any], name: str) -> None:
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
        # A group of one has the mean 0 there, and the deviation 1.
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
    """GDPO's parts of the reward."""
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
        values["critic.warmup_steps"] = steps - 1  # there the policy trains from the step of this number on, from 1
        if steps > values["run.num_steps"]:
            source.refuse(
                "trainer.critic_warmup", f"at most the run's {values['run.num_steps']} steps, for the policy to train"
            )
    path = source.text("critic.model.path")
    if path and path != values["model.path"]:
        values["critic.path"] = path
    values[f"{PPO}.value_clip"] = source.number("critic.cliprange_value", 0.5, above=0, infinite=True)
    if source.text("critic.loss_agg_mode", "token-mean") != "token-mean":
        source.report("critic.loss_agg_mode", "the critic's loss is the mean over tokens")
    of_optimizer = "the critic has the policy's schedule and moments"
    for key, what in (
        ("ppo_mini_batch_size", "the critic makes as many updates as the policy"),
        *((f"optim.{name}", of_optimizer) for name in LIKE_THE_POLICY.split()),
    ):
        found = source.take(f"critic.{key}")
        if found is not None and found != source.look(f"{ACTOR}.{key}"):
            source.report(f"critic.{key}", what)


def _loss(source: Source, values: dict[str, Any], section: str) -> None:
    values[f"{section}.previous_logprobs"] = "trainer"
    mode = source.text(f"{POLICY_LOSS}.loss_mode", "vanilla")
    is_bypassed = source.flag(f"{CORRECTION}.bypass_mode") or mode == "bypass_mode"
    # verl's older trainer sets that mode, which is the clipped loss or REINFORCE; its newer one keeps the loss.
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
    _correction(source, values, section, is_bypassed=is_bypassed, reads_type=reads_type)
    if coefficient := source.number(f"{ACTOR}.entropy_coeff", 0.0, least=0):
        values[f"{section}.entropy_coefficient"] = coefficient


def _clip_range(source: Source, values: dict[str, Any], section: str, mode: str) -> None:
    both = source.number(f"{ACTOR}.clip_ratio", 0.2, least=0)
    low = source.number(f"{ACTOR}.clip_ratio_low", both, least=0)
    high = source.number(f"{ACTOR}.clip_ratio_high", both, least=0)
    dual = source.number(f"{ACTOR}.clip_ratio_c", 3.0, least=1)
    if mode == "geo_mean":  # there the bounds are of the ratio's logarithm
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
    else:
        values[f"{section}.constant_length"] = 1


def _correction(source: Source, values: dict[str, Any], section: str, *, is_bypassed: bool, reads_type: bool) -> None:
    """Weights and masks for the generator's other numerics."""
    kind = source.text(f"{CORRECTION}.rollout_is")
    low, high = _bounds(source, f"{CORRECTION}.rollout_is_threshold", source.take(f"{CORRECTION}.rollout_is_threshold", 2.0))
    measures = source.flag(f"{ROLLOUT}.calculate_log_probs", default=True)
    how = source.text(f"{CORRECTION}.loss_type", "ppo_clip")
    values[f"{section}.importance_correction"] = "none"
    if is_bypassed:
        _bypass(source, values, section, kind=kind, maximum=high, is_reinforce=reads_type and how == "reinforce")
    elif kind not in (None, "token", "sequence"):
        source.report(f"{CORRECTION}.rollout_is", "no such weights: none are taken")
    elif kind is not None and not measures:
        source.report(
            f"{ROLLOUT}.calculate_log_probs", "without the generator's probabilities verl weighs nothing", changes_meaning=False
        )
    elif kind is not None:
        if section == PPO and kind == "sequence":
            source.report(f"{CORRECTION}.rollout_is", "with a critic weights are those of tokens")
            kind = "token"
        values |= {f"{section}.importance_correction": kind, f"{section}.importance_maximum": high}
        if low is not None and section == GRPO:
            values |= {f"{section}.importance_minimum": low, f"{section}.importance_bound": "mask"}
        elif low is not None:
            source.report(f"{CORRECTION}.rollout_is_threshold", "with a critic a weight outside of its bounds is cut, not 0")
    _rejection(source, values, section, is_on=measures and not is_bypassed)


def _bypass(
    source: Source, values: dict[str, Any], section: str, *, kind: str | None, maximum: float, is_reinforce: bool
) -> None:
    """Two policies: the ratio is that to the generator's probabilities."""
    if values.get(f"{section}.objective") == "kl_cov":
        source.report(f"{CORRECTION}.bypass_mode", "the loss kl_cov needs the trainer's probabilities")
        return
    values[f"{section}.previous_logprobs"] = "generation"
    if not is_reinforce:
        return
    if section == PPO:
        source.report(f"{CORRECTION}.loss_type", "with a critic the clipped loss is the only one")
        return
    for name in ("clip_low", "clip_high", "dual_clip"):
        values.pop(f"{GRPO}.{name}", None)
    if kind is None:
        values[f"{GRPO}.objective"] = "policy_gradient"
        return
    ratio = "sequence_product" if kind == "sequence" else "token"
    values |= {f"{GRPO}.objective": "cispo", f"{GRPO}.ratio": ratio, f"{GRPO}.clip_low": 1.0}
    values[f"{GRPO}.clip_high"] = max(0.0, maximum - 1)  # log-probabilities weighed by a ratio of at most this


def _rejection(source: Source, values: dict[str, Any], section: str, *, is_on: bool) -> None:
    kind, bounds = source.text(f"{CORRECTION}.rollout_rs"), source.take(f"{CORRECTION}.rollout_rs_threshold")
    if kind is None:
        return
    if kind != "seq_mean_k1" or section == PPO or not is_on or bounds is None:
        why = "no such mask: geometric_minimum and geometric_maximum are those of seq_mean_k1, without bypass_mode"
        source.report(f"{CORRECTION}.rollout_rs", why)
        return
    low, high = _bounds(source, f"{CORRECTION}.rollout_rs_threshold", bounds)
    low = 1 / high if low is None else low
    # There the bounds are of the generator's probability over the trainer's, here of the inverse.
    values |= {f"{GRPO}.geometric_minimum": 1 / high, f"{GRPO}.geometric_maximum": 1 / low}
    source.report(f"{CORRECTION}.rollout_rs", "sequences that are left out count in the mean over the update")


def _bounds(source: Source, key: str, written: Any) -> tuple[float | None, float]:
    """The lower bound, if there is one, and the upper of "LOW_HIGH" or one number."""
    try:
        numbers = [float(part) for part in str(written).split("_")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or isinstance(written, bool) or not all(number > 0 for number in numbers):
        source.refuse(key, 'a number above 0, or two as "LOW_HIGH"')
        return None, 2.0
    if sorted(numbers) != numbers or (len(numbers) == 2 and numbers[0] == numbers[1]):
        source.refuse(key, "a lower bound below the upper one")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def _divergence(source: Source, values: dict[str, Any], section: str, estimator: str) -> None:
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
            what = "taken off the advantages of tokens, undivided"
            source.report(
                "algorithm.use_kl_in_reward", f"{what}: {SUMS_REWARDS}, before rewards are divided by their deviation"
            )


def name_teachers(source: Source) -> None:
    """Teachers have names of the user's, and their keys the fate of those of the one in verl's files."""
    source.aliases.update({f"{TEACHERS}.{name}": f"{TEACHERS}.teacher_model" for name in _teachers(source)})


def _teachers(source: Source) -> Mapping[str, Mapping[str, Any]]:
    found = source.look(TEACHERS)
    return {name: one for name, one in found.items() if isinstance(one, Mapping)} if isinstance(found, Mapping) else {}


def import_distillation(source: Source, values: dict[str, Any]) -> None:
    """The algorithm distill, for what it can do; a refusal for what it cannot."""
    loss = "distillation.distillation_loss"
    mode = source.text(f"{loss}.loss_mode", "k3")
    rewards = source.flag(f"{loss}.use_task_rewards", default=True)
    by_gradient = source.flag(f"{loss}.use_policy_gradient", default=True)
    teachers = _teachers(source)
    named = {name: one.get("model_path") for name, one in teachers.items() if one.get("model_path")}
    source.taken.update(dict.fromkeys(f"{TEACHERS}.{name}.model_path" for name in teachers))
    expected = "one teacher, whose reverse KL divergence is all that is learned from: teacher_models.*.model_path of one"
    if len(named) != 1:
        source.refuse("distillation.teacher_models", expected)
    for key, is_right, what in (
        ("loss_mode", mode in ("k1", "kl"), '"k1", the divergence whose policy gradient the algorithm distill follows'),
        ("use_task_rewards", not rewards, "false: the algorithm distill learns from the teacher alone"),
        ("use_policy_gradient", by_gradient, "true, which the algorithm distill does"),
    ):
        if not is_right:
            remedy = "Or leave distillation.enabled out, and train by rewards alone"
            source.refuse("distillation.enabled", f"{loss}.{key} = {what}", remedy)
    values |= {
        "algorithm.name": "distill",
        "reference.path": str(next(iter(named.values()), "")),
        "algorithm.distill.discount": 0.0,
    }
    source.report(f"{loss}.loss_mode", "weights of an older policy are cut at importance_maximum, and not clipped")
    for key in ("topk", "policy_loss_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        source.ignore(f"{loss}.{key}")
    if source.text(f"{ACTOR}.loss_agg_mode", "token-mean") != "token-mean":
        source.report(f"{ACTOR}.loss_agg_mode", "the mean over tokens")
    if source.number(f"{ACTOR}.entropy_coeff", 0.0):
        source.report(f"{ACTOR}.entropy_coeff", "the algorithm distill has no entropy bonus")
    if values.pop("rollout.refill_equal_rewards"):
        source.report("algorithm.filter_groups.enable", "the algorithm distill compares no rewards")
    values.pop("rollout.max_refill_ratio", None)
    source.ignore(f"{ROLLOUT}.calculate_log_probs")
    source.ignore("algorithm", "critic", POLICY_LOSS, "reward", "reward_model", "trainer.critic_warmup")
    source.ignore(*(f"{ACTOR}.{key}" for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")))
    source.ignore(*(f"{ACTOR}.{key}" for key in ("tau_pos", "tau_neg", "loss_scale_factor", "kl_loss_coef", "kl_loss_type")))
