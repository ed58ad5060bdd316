"""verl's distillation becomes the algorithm distill, or is refused with the reason."""

import pytest

from rlcore.spi import ConfigError

from .verl_batches import Read

DISTILLS = ["enabled=true", "teacher_models={t: {model_path: big}}", "distillation_loss.loss_mode=k1"]
DISTILLS += ["distillation_loss.use_task_rewards=false", "distillation_loss.use_policy_gradient=true"]


def test_distillation_by_the_reverse_divergence_is_the_algorithm_distill(read_verl: Read) -> None:
    found = read_verl(*(f"+distillation.{one}" for one in DISTILLS))
    assert (found.values["algorithm.name"], found.values["reference.path"]) == ("distill", "big")
    assert not [key for key in found.values if key.startswith("algorithm.grpo")]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+distillation.distillation_loss.loss_mode=forward_kl_topk", "distillation.enabled"),
        ("+distillation.distillation_loss.use_task_rewards=true", "distillation.enabled"),
        ("+distillation.distillation_loss.use_policy_gradient=false", "distillation.enabled"),
        ("+distillation.teacher_models.other.model_path=more", "distillation.teacher_models"),
        ("distillation.teacher_models.t.model_path=null", "distillation.teacher_models"),
        ("+actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_p"),
    ],
)
def test_other_distillation_is_refused_with_its_reason(read_verl: Read, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: found"):
        read_verl(*(f"+distillation.{one}" for one in DISTILLS), override)
