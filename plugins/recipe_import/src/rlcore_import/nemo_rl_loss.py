"""Imports the advantages and losses of NeMo-RL's recipes."""

import math
from typing import Any

from rlcore_import.source import Source

GRPO, LOSS, ESTIMATOR, SHAPING = "algorithm.grpo", "loss_fn", "grpo.adv_estimator", "grpo.reward_shaping"
OPD = "on_policy_distillation"
CLAMPS = {f"{LOSS}.kl_input_clamp_value": 20.0, f"{LOSS}.kl_output_clamp_value": 10.0}
"""rlcore's bounds of the KL estimate, by NeMo-RL's keys: of the log-ratio, and of the estimate."""
TRUNCATION = f"{LOSS}.truncated_importance_sampling_type"
TRUNCATED = f"{LOSS}.truncated_importance_sampling_ratio"


def import_advantages(source: Source, values: dict[str, Any]) -> None:
    """Import the estimator of advantages."""
    name = source.text(f"{ESTIMATOR}.name", "grpo")
    normalises = source.flag(f"{ESTIMATOR}.normalize_rewards", source.flag("grpo.normalize_rewards", True))
    leaves_out = source.flag(f"{ESTIMATOR}.use_leave_one_out_baseline", source.flag("grpo.use_leave_one_out_baseline", True))
    minus_baseline = source.flag(f"{ESTIMATOR}.minus_baseline", True)
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        if source.look(f"{ESTIMATOR}.{key}") is None and source.look(f"grpo.{key}") is False:
            source.report(f"grpo.{key}", f"newer versions read {ESTIMATOR}.{key} alone, which is true where it is left out")
    baseline = "leave_one_out" if leaves_out else "group_mean"
    normalisation = ("leave_one_out_std" if leaves_out else "std") if normalises else "none"
    if name == "reinforce_plus_plus":
        baseline = "group_mean" if minus_baseline else "none"
        normalisation = "batch_whitening"
    elif name == "gdpo":
        values[f"{GRPO}.reward_aggregation"] = "normalise_then_sum"
        if not normalises:
            normalisation = "leave_one_out_std" if leaves_out else "std"
            source.report(f"{ESTIMATOR}.normalize_rewards", "each component of a reward is divided by its deviation")
    elif name != "grpo":
        source.refuse(f"{ESTIMATOR}.name", "grpo, gdpo, reinforce_plus_plus or opd")
    if source.take(f"{ESTIMATOR}.reward_weights"):
        source.report(f"{ESTIMATOR}.reward_weights", "algorithm.grpo.reward_weights names the components, here 1 each")
    if normalisation == "leave_one_out_std":
        source.report(f"{ESTIMATOR}.use_leave_one_out_baseline", "the others' deviation counts at least half the group's")
    if baseline != "none" and values["rollout.samples_per_prompt"] == 1:
        source.refuse("grpo.num_generations_per_prompt", "several: advantages compare the samples of a group")
    values[f"{GRPO}.advantage_baseline"] = baseline
    values[f"{GRPO}.advantage_normalisation"] = normalisation
    _shaping(source, values)


def _shaping(source: Source, values: dict[str, Any]) -> None:
    """Import DAPO's penalty of long answers, as a share of the longest answer."""
    answer = values["rollout.max_response_tokens"]
    longest = source.number(f"{SHAPING}.max_response_length", float(answer), least=1)
    buffer = source.number(f"{SHAPING}.overlong_buffer_length", 128.0, least=1)
    penalty = source.number(f"{SHAPING}.overlong_buffer_penalty", 1.0, least=0)
    properly = source.number(f"{SHAPING}.stop_properly_penalty_coef", least=0)
    if not source.flag(f"{SHAPING}.enabled"):
        return
    if properly is not None:
        source.report(f"{SHAPING}.stop_properly_penalty_coef", "rewards of answers that were cut are not scaled down")
        return
    over = answer - (longest - buffer)
    if over <= 0 and penalty:
        source.report(f"{SHAPING}.enabled", f"answers of at most {answer} tokens have no penalty: it begins behind them")
    if over <= 0 or not penalty:
        return
    values[f"{GRPO}.length_penalty"] = "soft_overlong"
    values[f"{GRPO}.length_penalty_buffer"] = min(1.0, over / answer)
    values[f"{GRPO}.length_penalty_weight"] = penalty * min(over, answer) / buffer
    if over > answer:
        source.report(f"{SHAPING}.overlong_buffer_length", "the penalty of an answer without a token is 0")


def import_loss(source: Source, values: dict[str, Any]) -> None:
    """Import the objective, the KL term and the importance correction."""
    values[f"{GRPO}.previous_logprobs"] = "trainer"
    values[f"{GRPO}.loss_normalisation"] = "token" if source.flag(f"{LOSS}.token_level_loss", True) else "sequence"
    low = source.number(f"{LOSS}.ratio_clip_min", 0.2, least=0)
    high = source.number(f"{LOSS}.ratio_clip_max", 0.2, least=0)
    dual = source.number(f"{LOSS}.ratio_clip_c")
    of_sequence = source.flag(f"{LOSS}.sequence_level_importance_ratios")
    clips_weights, has_no_ratio = source.flag(f"{LOSS}.use_cispo"), source.flag(f"{LOSS}.disable_ppo_ratio")
    if source.flag(f"{LOSS}.force_on_policy_ratio") and values["training.minibatches_per_step"] > 1:
        has_no_ratio = True
    objective = "policy_gradient" if has_no_ratio else "cispo" if clips_weights else "clipped"
    values[f"{GRPO}.objective"] = objective
    if objective != "policy_gradient":
        values |= {f"{GRPO}.clip_low": min(1.0, low), f"{GRPO}.clip_high": high}
        if of_sequence:
            values[f"{GRPO}.ratio"] = "sequence"
    if dual is not None and dual <= 1:
        source.refuse(f"{LOSS}.ratio_clip_c", "a number above 1, or null")
    elif dual is not None and objective == "cispo":
        source.refuse(f"{LOSS}.ratio_clip_c", "null, with use_cispo, as NeMo-RL itself asks")
    elif dual is not None and objective == "clipped":  # without a ratio the bound is never reached
        values[f"{GRPO}.dual_clip"] = dual
    if likelihood := source.number(f"{LOSS}.positive_example_nll_weight", 0.0, least=0):
        values[f"{GRPO}.likelihood_coefficient"] = likelihood
    _divergence(source, values, of_sequence=of_sequence and objective != "policy_gradient")
    _importance(source, values, of_sequence=of_sequence)


def _divergence(source: Source, values: dict[str, Any], *, of_sequence: bool) -> None:
    coefficient = source.number(f"{LOSS}.reference_policy_kl_penalty", 0.0, least=0)
    kind = source.text(f"{LOSS}.reference_policy_kl_type", "k3")
    weighs = source.flag(f"{LOSS}.use_on_policy_kl_approximation")
    in_reward = source.flag(f"{LOSS}.use_kl_in_reward")
    bounds = {key: (bound, source.number(key)) for key, bound in CLAMPS.items()}
    if in_reward and coefficient and source.look(f"{ESTIMATOR}.name") != "reinforce_plus_plus":
        coefficient = 0.0  # neither this estimator nor the loss reads it then
    values[f"{GRPO}.kl_coefficient"] = coefficient
    if not coefficient:
        return
    if kind not in ("k1", "k2", "k3"):
        source.refuse(f"{LOSS}.reference_policy_kl_type", "k1, k2 or k3")
    if in_reward and of_sequence:
        values[f"{GRPO}.kl_coefficient"] = 0.0
        source.report(
            f"{LOSS}.use_kl_in_reward", "with one ratio for a sequence no token has an advantage of its own: there is no KL"
        )
        return
    values[f"{GRPO}.kl_estimator"] = kind
    if in_reward:
        values[f"{GRPO}.kl_placement"] = "reward_to_go"
        source.report(
            f"{LOSS}.use_kl_in_reward",
            "an advantage loses the generator's estimates from its token to the end of the answer, where there it loses the "
            "token's own, of the trainer",
        )
        return
    values[f"{GRPO}.kl_gradient"] = "expectation"
    if weighs:
        values[f"{GRPO}.kl_importance"] = "generation"
        values[f"{GRPO}.kl_maximum"] = bounds[f"{LOSS}.kl_output_clamp_value"][1] or 10.0
    for key, (bound, found) in bounds.items():
        if found != bound and key.removeprefix(f"{LOSS}.") in (source.look(LOSS) or {}):
            source.report(key, f"the bound is {bound:g}")


def _importance(source: Source, values: dict[str, Any], *, of_sequence: bool) -> None:
    """Import the importance weights that correct for the generator's numerics."""
    corrects = source.flag(f"{LOSS}.use_importance_sampling_correction")
    kind = source.text(TRUNCATION)
    most = source.number(TRUNCATED, math.inf, least=0, infinite=True)
    least = source.number(f"{TRUNCATED}_min", 0.0, least=0)
    if source.look(TRUNCATED) is None:
        least = 0.0  # NeMo-RL reads the lower bound beside the upper one alone
    if not corrects:
        values[f"{GRPO}.importance_correction"] = "none"
        return
    if kind not in (None, "tis", "icepop", "seq-mask-tis"):
        source.refuse(TRUNCATION, "tis, icepop or seq-mask-tis")
    if least >= most:
        source.refuse(TRUNCATED, "more than truncated_importance_sampling_ratio_min")
    values[f"{GRPO}.importance_correction"] = "sequence" if of_sequence else "token"
    if kind == "seq-mask-tis":
        bounds = {f"{GRPO}.geometric_minimum": least, f"{GRPO}.geometric_maximum": most}
        values |= {f"{GRPO}.importance_maximum": math.inf, **bounds}
        return
    values |= {f"{GRPO}.importance_maximum": most, f"{GRPO}.importance_minimum": least}
    values[f"{GRPO}.importance_bound"] = "mask" if kind == "icepop" else "truncate"


def import_distillation(source: Source, values: dict[str, Any]) -> None:
    """Import on-policy distillation from one teacher, without rewards and ratios."""
    teachers = source.table(f"{OPD}.teacher_model_by_agent_name")
    found = sorted({str(teacher) for teacher in teachers.values()})
    if len(found) != 1:
        expected = "one teacher for all agents, which [reference] is"
        source.refuse(f"{OPD}.teacher_model_by_agent_name", expected, "Take the recipe of one teacher.")
    values |= {"algorithm.name": "distill", "reference.path": found[0] if found else ""}
    source.take(f"{ESTIMATOR}.name")
    source.ignore(LOSS, ESTIMATOR, SHAPING, "grpo.reward_scaling", "reward_penalties")
    source.ignore("grpo.normalize_rewards", "grpo.use_leave_one_out_baseline", "grpo.dynamic_sampling_max_gen_batches")
    if source.flag("grpo.use_dynamic_sampling"):
        source.report("grpo.use_dynamic_sampling", "no group is replaced: rewards play no part")
    if source.number(f"{LOSS}.reference_policy_kl_penalty", 0.0):
        source.report(f"{LOSS}.reference_policy_kl_penalty", "no further KL term: [reference] is the teacher")
    if not source.flag(f"{LOSS}.disable_ppo_ratio"):
        source.report(f"{LOSS}.disable_ppo_ratio", "a token's divergence weighs its log-probability, without a clipped ratio")
    if not source.flag(f"{LOSS}.token_level_loss", True):
        source.report(f"{LOSS}.token_level_loss", "the loss is the mean over tokens")
    most = source.number(TRUNCATED, math.inf, least=0, infinite=True)
    if not source.flag(f"{LOSS}.use_importance_sampling_correction"):
        source.report(
            f"{LOSS}.use_importance_sampling_correction", "tokens weigh by their ratio to the generator's probability"
        )
        most = math.inf
    values["algorithm.distill.importance_maximum"] = most
    if most < math.inf and (source.text(TRUNCATION) != "tis" or source.number(f"{TRUNCATED}_min", 0.0)):
        source.report(TRUNCATION, "weights above the bound are cut to it, and those below another one stay as they are")
    if values["training.minibatches_per_step"] > 1:
        source.report("policy.train_global_batch_size", "divergences of later updates are those of the policy as it is then")


def import_preferences(source: Source, values: dict[str, Any]) -> None:
    """Import the loss of preference pairs."""
    weight = source.number("dpo.preference_loss_weight", 1.0, least=0)
    learned = source.number("dpo.sft_loss_weight", 0.0, least=0)
    averages = source.flag("dpo.sft_average_log_probs")
    beta = source.number("dpo.reference_policy_kl_penalty", 0.05, least=0)
    if not weight or not beta:
        source.refuse("dpo.preference_loss_weight" if not weight else "dpo.reference_policy_kl_penalty", "a number above 0")
        return
    values["algorithm.dpo.beta"] = beta
    values["algorithm.dpo.length_normalised"] = source.flag("dpo.preference_average_log_probs")
    values["algorithm.dpo.sft_coefficient"] = learned / weight
    if weight != 1:
        source.report(
            "dpo.preference_loss_weight", f"the loss is divided by it, which counts where gradients are clipped: {weight:g}"
        )
    if learned and not averages:
        source.report("dpo.sft_average_log_probs", "the term is the mean over an answer's tokens, where there it is their sum")
