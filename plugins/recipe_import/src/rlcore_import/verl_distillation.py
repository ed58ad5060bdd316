"""Imports verl's distillation from a teacher."""

from collections.abc import Mapping
from typing import Any

from rlcore_import.source import Source
from rlcore_import.verl_rows import ACTOR, POLICY_LOSS, ROLLOUT

TEACHERS = "distillation.teacher_models"


def name_teachers(source: Source) -> None:
    """Give each teacher that the user names the rows of the one in verl's files."""
    source.aliases.update({f"{TEACHERS}.{name}": f"{TEACHERS}.teacher_model" for name in _teachers(source)})


def _teachers(source: Source) -> Mapping[str, Mapping[str, Any]]:
    found = source.look(TEACHERS)
    return {name: one for name, one in found.items() if isinstance(one, Mapping)} if isinstance(found, Mapping) else {}


def import_distillation(source: Source, values: dict[str, Any]) -> None:
    """Import distillation as the algorithm distill; refuse the options that it lacks."""
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
    if values.pop("rollout.dynamic_sampling"):
        source.report("algorithm.filter_groups.enable", "the algorithm distill compares no rewards")
    values.pop("rollout.max_refill_ratio", None)
    source.ignore(f"{ROLLOUT}.calculate_log_probs")
    source.ignore("algorithm", "critic", POLICY_LOSS, "reward", "reward_model", "trainer.critic_warmup")
    source.ignore(*(f"{ACTOR}.{key}" for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")))
    source.ignore(*(f"{ACTOR}.{key}" for key in ("tau_pos", "tau_neg", "loss_scale_factor", "kl_loss_coef", "kl_loss_type")))
