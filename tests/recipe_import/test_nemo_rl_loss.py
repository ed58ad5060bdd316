"""A batch has the advantages, loss and gradient that NeMo-RL's own code computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from rlcore.spi import ConfigError, TokenBatch
from rlcore_distill.config import DistillConfig
from rlcore_distill.loss import reverse_kl_loss
from rlcore_dpo.config import DpoConfig
from rlcore_dpo.loss import dpo_loss
from rlcore_grpo.config import GrpoConfig
from rlcore_import.recipe import ImportedRecipe
from rlcore_torchkit.rl.advantages import decoupled_advantages, group_advantages
from rlcore_torchkit.rl.advantages import whitened as white
from rlcore_torchkit.rl.policy_gradient import policy_gradient_loss
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS, likelihood_weights, soft_overlong_penalty

from .nemo_losses import LENGTHS, Step, advantages, distillation_loss, pair_loss, policy_loss, positive_nll, whitened
from .nemo_recipes import DPO, grpo, imported, reported

CORRECTS = {"use_importance_sampling_correction": True}
TRUNCATED = "truncated_importance_sampling"
LOSSES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "two bounds": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.05},
    "wide": {"ratio_clip_min": 1.5, "ratio_clip_max": 4.0},
    "dual clip": {"ratio_clip_c": 1.1},
    "of answers": {"token_level_loss": False},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False, "ratio_clip_max": 0.02},
    "cispo": {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.1},
    "reinforce": {"disable_ppo_ratio": True, "ratio_clip_c": 3.0},
    "on policy": {"force_on_policy_ratio": True},
    "k1": {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"},
    "k2 of answers": {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k2", "token_level_loss": False},
    "k3": {"reference_policy_kl_penalty": 0.3},
    "k3 by the generator": {"reference_policy_kl_penalty": 0.3, "use_on_policy_kl_approximation": True},
    "no kl": {"reference_policy_kl_penalty": 0.3, "use_kl_in_reward": True},
    "weights": CORRECTS,
    "tis": {**CORRECTS, f"{TRUNCATED}_type": "tis", f"{TRUNCATED}_ratio": 1.05},
    "tis below": {**CORRECTS, f"{TRUNCATED}_type": "tis", f"{TRUNCATED}_ratio": 1.1, f"{TRUNCATED}_ratio_min": 0.95},
    "icepop": {**CORRECTS, f"{TRUNCATED}_type": "icepop", f"{TRUNCATED}_ratio": 1.1, f"{TRUNCATED}_ratio_min": 0.95},
    "answers left out": {
        **CORRECTS,
        f"{TRUNCATED}_type": "seq-mask-tis",
        f"{TRUNCATED}_ratio": 1.005,
        f"{TRUNCATED}_ratio_min": 0.98,
    },
    "whole answers": {**CORRECTS, "sequence_level_importance_ratios": True, "token_level_loss": False},
    "whole answers without a ratio": {
        **CORRECTS,
        "disable_ppo_ratio": True,
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
    },
}


def overrides(settings: dict[str, Any], table: str = "loss_fn") -> list[str]:
    return [f"{table}.{key}={value}".replace("True", "true").replace("False", "false") for key, value in settings.items()]


def options(found: ImportedRecipe, name: str) -> dict[str, Any]:
    """The algorithm's options that a recipe says."""
    section = f"algorithm.{name}."
    return {key.removeprefix(section): value for key, value in found.values.items() if key.startswith(section)}


def gradient(loss: torch.Tensor, step: Step) -> torch.Tensor:
    return torch.autograd.grad(loss, step.current)[0]


@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES)
def test_a_batch_has_the_same_loss_and_gradient(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, **settings}
    found = grpo(tmp_path, *overrides(settings))
    step = Step.drawn(5, is_first=bool(settings.get("force_on_policy_ratio")))
    ours = policy_gradient_loss(step.inputs(), GrpoConfig(**options(found, "grpo"))).loss
    theirs = policy_loss(step, settings)
    if not settings.get("force_on_policy_ratio"):  # whose value is that of a ratio of 1
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    np.testing.assert_allclose(gradient(ours, step), gradient(theirs, step), rtol=1e-9, atol=1e-12)


def test_the_likelihood_of_rewarded_answers_has_the_same_weight(tmp_path: Path) -> None:
    """NeMo-RL takes the mean over the microbatch's tokens of such answers, which are the step's where it has one."""
    settings = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2}
    found = grpo(tmp_path, *overrides(settings), "loss_fn.positive_example_nll_weight=0.1")
    step, rewards = Step.drawn(7), np.random.default_rng(7).integers(-1, 2, len(LENGTHS)).astype(np.float32)
    batch = TokenBatch(
        tokens=np.zeros(sum(LENGTHS) + len(LENGTHS), np.int32),
        offsets=np.concatenate([[0], np.cumsum(np.array(LENGTHS) + 1)]),
        loss_mask=np.concatenate([np.arange(length + 1) > 0 for length in LENGTHS]),
    )
    column = torch.tensor(likelihood_weights(batch, rewards)[batch.loss_mask])
    inputs = step.inputs()
    inputs = evolve(inputs, token_columns={**inputs.token_columns, LIKELIHOOD_WEIGHTS: column})
    ours = policy_gradient_loss(inputs, GrpoConfig(**options(found, "grpo"))).loss
    theirs = policy_loss(step, settings) + 0.1 * positive_nll(step, rewards)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-7)
    np.testing.assert_allclose(gradient(ours, step), gradient(theirs, step), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("leaves_out", [False, True])
@pytest.mark.parametrize("normalises", [False, True])
def test_rewards_become_the_same_advantages(tmp_path: Path, leaves_out: bool, normalises: bool) -> None:
    prefix = "grpo.adv_estimator"
    found = grpo(tmp_path, f"{prefix}.normalize_rewards={normalises}", f"{prefix}.use_leave_one_out_baseline={leaves_out}")
    rewards = np.array([[0.0, 1.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5, 0.5], [1.0, 2.0, 0.0, 1.5, 1.0]])
    ours = group_advantages(rewards.ravel(), np.repeat(np.arange(3), 5), **advantage_options(found))
    theirs = advantages(rewards, leaves_out=leaves_out, normalises=normalises)
    np.testing.assert_allclose(ours.reshape(3, 5), theirs, rtol=1e-9, atol=1e-12)
    assert (f"{prefix}.use_leave_one_out_baseline" in reported(found)) is (leaves_out and normalises)


def advantage_options(found: ImportedRecipe) -> Any:
    given = options(found, "grpo")
    epsilon = GrpoConfig().advantage_epsilon
    return {
        "baseline": given["advantage_baseline"],
        "normalisation": given["advantage_normalisation"],
        "epsilon": epsilon,
    }


@pytest.mark.parametrize("minus_baseline", [False, True])
def test_reinforce_plus_plus_whitens_the_tokens_of_a_step(tmp_path: Path, minus_baseline: bool) -> None:
    found = grpo(tmp_path, f"grpo.adv_estimator={{name: reinforce_plus_plus, minus_baseline: {minus_baseline}}}")
    rewards, lengths = np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]]), np.array([300, 200, 500, 700, 400, 900])
    groups = np.repeat([0, 1], 3)
    ours = white(np.repeat(group_advantages(rewards.ravel(), groups, **advantage_options(found)), lengths), epsilon=1e-6)
    baseline = rewards.mean(1, keepdims=True) if minus_baseline else 0.0
    np.testing.assert_allclose(ours, whitened(np.repeat((rewards - baseline).ravel(), lengths)), rtol=1e-3)


def test_components_of_a_reward_are_normalised_and_added(tmp_path: Path) -> None:
    found = grpo(tmp_path, "grpo.adv_estimator={name: gdpo, use_leave_one_out_baseline: false}")
    assert found.values["algorithm.grpo.reward_aggregation"] == "normalise_then_sum"
    first, second = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), np.array([[0.2, 0.4, 0.1], [0.9, 0.1, 0.3]])
    groups = np.repeat([0, 1], 3)
    ours = decoupled_advantages([first.ravel(), second.ravel()], [1.0, 1.0], groups, **advantage_options(found))
    summed = sum(advantages(part, leaves_out=False, normalises=True).ravel() for part in (first, second))
    np.testing.assert_allclose(ours, (summed - summed.mean()) / summed.std(ddof=1), rtol=1e-5)


@pytest.mark.parametrize(("longest", "buffer", "penalty"), [(768, 192, 0.5), (700, 100, 1.0), (900, 300, 2.0), (400, 64, 1.0)])
def test_long_answers_have_the_same_penalty(tmp_path: Path, longest: int, buffer: int, penalty: float) -> None:
    shaping = f"overlong_buffer_length: {buffer}, overlong_buffer_penalty: {penalty}, max_response_length: {longest}"
    given = options(grpo(tmp_path, f"grpo.reward_shaping={{enabled: true, {shaping}}}"), "grpo")
    lengths = np.arange(1, 769)
    buffer_here = given["length_penalty_buffer"] * 768
    ours = given["length_penalty_weight"] * soft_overlong_penalty(lengths, max_length=768, buffer=buffer_here)
    theirs = np.minimum(-(lengths - (longest - buffer)) / buffer * penalty, 0.0)
    np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_a_penalty_that_no_answer_reaches_is_none(tmp_path: Path) -> None:
    shaping = "{enabled: true, overlong_buffer_length: 100, overlong_buffer_penalty: 1, max_response_length: 2000}"
    found = grpo(tmp_path, f"grpo.reward_shaping={shaping}")
    assert "algorithm.grpo.length_penalty" not in found.values
    assert "grpo.reward_shaping.enabled" in reported(found)
    found = grpo(tmp_path, "grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0.5, max_response_length: 768}")
    assert "algorithm.grpo.length_penalty" not in found.values
    assert "grpo.reward_shaping.stop_properly_penalty_coef" in reported(found)


TEACHER = "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: t, b: t}}"


def test_distillation_has_the_same_gradient(tmp_path: Path) -> None:
    settings = {"disable_ppo_ratio": True, **CORRECTS, f"{TRUNCATED}_type": "tis", f"{TRUNCATED}_ratio": 1.05}
    settings["reference_policy_kl_penalty"] = 0.0
    found = grpo(tmp_path, TEACHER, "policy.train_global_batch_size=128", *overrides(settings))
    assert (found.values["algorithm.name"], found.values["reference.path"]) == ("distill", "t")
    step = Step.drawn(2, is_first=True)
    ours = reverse_kl_loss(step.inputs(), DistillConfig(**options(found, "distill"))).loss
    np.testing.assert_allclose(gradient(ours, step), gradient(distillation_loss(step, settings), step), rtol=1e-9, atol=1e-12)
    assert not {key for key in reported(found) if key.startswith("loss_fn")}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({f"{TRUNCATED}_type": "icepop", f"{TRUNCATED}_ratio": 5.0, f"{TRUNCATED}_ratio_min": 0.2}, f"{TRUNCATED}_type"),
        ({"token_level_loss": False}, "token_level_loss"),
        ({"disable_ppo_ratio": False}, "disable_ppo_ratio"),
        ({"use_importance_sampling_correction": False}, "use_importance_sampling_correction"),
        ({"reference_policy_kl_penalty": 0.1}, "reference_policy_kl_penalty"),
    ],
)
def test_what_distillation_has_not_is_reported(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    given = {"disable_ppo_ratio": True, **CORRECTS, "reference_policy_kl_penalty": 0.0, **settings}
    assert f"loss_fn.{key}" in reported(grpo(tmp_path, TEACHER, *overrides(given)))


def test_several_teachers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="teacher_model_by_agent_name"):
        grpo(tmp_path, "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: t, b: u}}")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preference_average_log_probs": True, "reference_policy_kl_penalty": 5},
        {"sft_loss_weight": 0.3, "sft_average_log_probs": True},
        {"sft_loss_weight": 0.3, "sft_average_log_probs": True, "preference_loss_weight": 2},
        {"sft_loss_weight": 0.3, "sft_average_log_probs": False},
    ],
)
def test_pairs_have_the_same_loss_or_it_is_reported(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"sft_loss_weight": 0.0, "preference_average_log_probs": False, "reference_policy_kl_penalty": 0.1, **settings}
    found = imported(tmp_path, DPO, *overrides(settings, "dpo"))
    step = Step.drawn(3)
    ours = dpo_loss(step.inputs(), DpoConfig(**options(found, "dpo"))).loss
    theirs = pair_loss(step, settings) / settings.get("preference_loss_weight", 1)
    is_same = ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    assert is_same is not ("dpo.sft_average_log_probs" in reported(found))
    assert ("dpo.preference_loss_weight" in reported(found)) is (settings.get("preference_loss_weight", 1) != 1)
    assert len(LENGTHS) % 2 == 0


def test_a_kl_divergence_in_rewards_is_reported_and_is_none_without_reinforce_plus_plus(tmp_path: Path) -> None:
    found = grpo(tmp_path, "loss_fn.use_kl_in_reward=true", "grpo.adv_estimator={name: reinforce_plus_plus}")
    assert found.values["algorithm.grpo.kl_placement"] == "reward_to_go"
    assert "loss_fn.use_kl_in_reward" in reported(found)
    assert grpo(tmp_path, "loss_fn.use_kl_in_reward=true").values["algorithm.grpo.kl_coefficient"] == 0


@pytest.mark.parametrize(("value", "is_reported"), [("20.0", False), ("null", True), ("5", True)])
def test_other_bounds_of_the_estimate_are_reported(tmp_path: Path, value: str, is_reported: bool) -> None:
    found = grpo(tmp_path, f"loss_fn.kl_input_clamp_value={value}", "loss_fn.kl_output_clamp_value=10.0")
    assert ("loss_fn.kl_input_clamp_value" in reported(found)) is is_reported
