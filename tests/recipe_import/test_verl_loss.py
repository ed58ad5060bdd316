"""What verl trains by, by meaning: the loss of a batch and its advantages are those of verl's formulas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    WEIGHT_VERSIONS,
    AlgorithmContext,
    ConfigError,
    ImportedRecipe,
    LossInputs,
    RolloutBatch,
    TokenBatch,
)
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.entropy_tokens import HIGH_COVARIANCE
from rlcore_grpo.loss import grpo_loss
from rlcore_import.verl import import_recipe

from . import peer_verl
from .peer_verl import Batch

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 64, "max_prompt_length": 32, "max_response_length": 40, "train_files": "t.parquet"},
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_penalty": "kl", "kl_ctrl": {"kl_coef": 0.01}},
    "actor_rollout_ref": {
        "model": {"path": "acme/small"},
        "actor": {"strategy": "fsdp", "ppo_mini_batch_size": 16, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
        "rollout": {"name": "vllm", "n": 4},
    },
    "trainer": {"total_training_steps": 100, "nnodes": 1, "n_gpus_per_node": 8},
}
ACTOR, LOSS, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss", "algorithm.rollout_correction"
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
Read = Callable[..., ImportedRecipe]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """read(KEY=VALUE...) -> what is imported."""
    file = tmp_path_factory.mktemp("verl") / "ppo.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    return lambda *overrides: import_recipe(Path(file), overrides)


@pytest.fixture(scope="module")
def batch() -> Batch:
    random = np.random.default_rng(1)
    mask = np.arange(9) < np.array([9, 4, 1, 6, 7, 2])[:, None]
    rollout = np.where(mask, -random.exponential(1.0, mask.shape), 0.0)

    def near(spread: float) -> Any:
        return np.where(mask, rollout + random.normal(0, spread, mask.shape), 0.0)

    entropy = np.where(mask, random.exponential(1.0, mask.shape), 0.0)
    advantages = np.array([1.5, -0.7, -2.0, 0.4, 1.1, -0.3])
    return Batch(
        policy=near(0.6), old=near(0.2), rollout=rollout, reference=near(0.5), entropy=entropy, advantages=advantages, mask=mask
    )


def config_of(found: ImportedRecipe) -> GrpoConfig:
    options = {key.rpartition(".")[2]: value for key, value in found.values.items() if key.startswith("algorithm.grpo.")}
    context = AlgorithmContext(
        seed=0,
        samples_per_prompt=4,
        updates_per_step=4,
        temperature=1.0,
        generation_logprobs_exact=False,
        max_response_tokens=found.values["rollout.max_response_tokens"],
    )
    return GrpoConfig(**options).resolved(context)


def loss_of(found: ImportedRecipe, batch: Batch, chosen: Any = None) -> float:
    """The loss of a batch here: each answer behind a prompt of one token."""
    lengths = batch.mask.sum(1) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    inside = np.ones(offsets[-1], bool)
    inside[offsets[:-1]] = False

    def packed(values: Any) -> torch.Tensor:
        found = np.zeros(len(inside))
        found[inside] = np.broadcast_to(values, batch.mask.shape)[batch.mask]
        return torch.tensor(found)

    columns = {
        GENERATION_LOGPROBS: packed(batch.rollout),
        REFERENCE_LOGPROBS: packed(batch.reference),
        ADVANTAGES: packed(batch.advantages[:, None]),
        HIGH_COVARIANCE: packed(np.zeros_like(batch.mask) if chosen is None else chosen),
    }
    tokens = TokenBatch(
        tokens=np.zeros(len(inside), np.int32), offsets=offsets.astype(np.int64), loss_mask=inside, token_columns={}
    )
    inputs = LossInputs(
        logprobs=packed(batch.policy),
        previous_logprobs=packed(batch.old),
        entropy=packed(batch.entropy),
        loss_mask=torch.tensor(inside),
        offsets=torch.tensor(offsets),
        token_columns=columns,
        sequence_columns={},
        counts=tokens.counts(),
    )
    return float(grpo_loss(inputs, config_of(found)).loss)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"])
def test_the_loss_is_verls(read: Read, batch: Batch, mode: str, aggregation: str) -> None:
    chosen = batch.mask & (np.arange(9) % 3 == 1) if mode in ("clip_cov", "kl_cov") else None
    overrides = [f"{LOSS}.loss_mode={mode}", f"{ACTOR}.loss_agg_mode={aggregation}", f"{LOSS}.ppo_kl_coef=0.1"]
    losses = peer_verl.policy_loss(batch, mode, low=0.2, high=0.3, chosen=chosen)
    counts = "seq-mean-token-mean" if mode in ("gspo", "sapo", "geo_mean") else aggregation
    expected = peer_verl.aggregate(losses, batch.mask, counts, 40)
    assert loss_of(read(*overrides), batch, chosen) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("clip_ratio=0.1", {"low": 0.2, "high": 0.3}),  # the two others are set, and count
        ("clip_ratio_low=0.05", {"low": 0.05, "high": 0.3}),
        ("clip_ratio_high=0.6", {"low": 0.2, "high": 0.6}),
        ("clip_ratio_c=1.2", {"low": 0.2, "high": 0.3, "dual": 1.2}),
    ],
)
def test_clip_ranges_are_verls(read: Read, batch: Batch, override: str, expected: dict[str, float]) -> None:
    losses = peer_verl.policy_loss(batch, "vanilla", **expected)  # type: ignore[arg-type]
    found = loss_of(read(f"{ACTOR}.{override}"), batch)
    assert found == pytest.approx(peer_verl.aggregate(losses, batch.mask, "token-mean", 40), rel=1e-9)


def test_one_clip_range_counts_where_the_others_are_not_set(read: Read, batch: Batch) -> None:
    found = read(f"{ACTOR}.clip_ratio=0.1", f"~{ACTOR}.clip_ratio_low", f"~{ACTOR}.clip_ratio_high")
    losses = peer_verl.policy_loss(batch, "vanilla", low=0.1, high=0.1)
    assert loss_of(found, batch) == pytest.approx(peer_verl.aggregate(losses, batch.mask, "token-mean", 40), rel=1e-9)


@pytest.mark.parametrize("kind", ["kl", "mse", "low_var_kl"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_terms_of_kl_and_entropy_are_verls(read: Read, batch: Batch, kind: str, aggregation: str) -> None:
    overrides = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={kind}", f"{ACTOR}.kl_loss_coef=0.3"]
    overrides += [f"{ACTOR}.entropy_coeff=0.02", f"{ACTOR}.loss_agg_mode={aggregation}", f"+{ACTOR}.loss_scale_factor=25"]
    losses = peer_verl.policy_loss(batch, "vanilla", low=0.2, high=0.3)
    losses = losses + 0.3 * peer_verl.kl_estimate(batch.policy, batch.reference, kind) - 0.02 * batch.entropy
    expected = peer_verl.aggregate(losses, batch.mask, aggregation, 25)
    assert loss_of(read(*overrides), batch) == pytest.approx(expected, rel=1e-9)


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
def test_weights_of_the_generator_are_verls(read: Read, batch: Batch, options: str, expected: dict[str, Any] | None) -> None:
    losses = peer_verl.policy_loss(batch, "vanilla", low=0.2, high=0.3)
    weighed = losses if expected is None else losses * peer_verl.weights(batch, **expected)
    found = loss_of(read(f"+{CORRECTION}={{{options}}}"), batch)
    assert found == pytest.approx(peer_verl.aggregate(weighed, batch.mask, "token-mean", 40), rel=1e-9)
    if expected is not None:
        plain = read(f"+{CORRECTION}={{{options}}}", "+actor_rollout_ref.rollout.calculate_log_probs=False")
        assert plain.values["algorithm.grpo.importance_correction"] == "none"  # verl has no probabilities to weigh by


@pytest.mark.parametrize("level", ["token", "sequence", None])
def test_bypass_mode_compares_with_the_generator(read: Read, batch: Batch, level: str | None) -> None:
    bypassed = Batch(**{**{field: getattr(batch, field) for field in Batch.__annotations__}, "old": batch.rollout})
    clipped = read(f"+{CORRECTION}={{bypass_mode: true, rollout_is: {level or 'null'}}}")
    losses = peer_verl.policy_loss(bypassed, "vanilla", low=0.2, high=0.3)
    assert loss_of(clipped, batch) == pytest.approx(peer_verl.aggregate(losses, batch.mask, "token-mean", 40), rel=1e-9)
    reinforce = f"bypass_mode: true, loss_type: reinforce, rollout_is: {level or 'null'}, rollout_is_threshold: 1.2"
    moved = Batch(**{**{field: getattr(batch, field) for field in Batch.__annotations__}, "old": batch.policy})
    weights = 1.0 if level is None else peer_verl.weights(moved, level, high=1.2)
    expected = peer_verl.aggregate(-batch.advantages[:, None] * batch.policy * weights, batch.mask, "token-mean", 40)
    assert loss_of(read(f"+{CORRECTION}={{{reinforce}}}"), batch) == pytest.approx(expected, rel=1e-9)


def test_sequences_far_from_the_generator_are_left_out_as_verl_does(read: Read, batch: Batch) -> None:
    found = read(f"+{CORRECTION}={{rollout_rs: seq_mean_k1, rollout_rs_threshold: '0.95_1.1'}}")
    mean = ((batch.rollout - batch.old) * batch.mask).sum(1) / batch.mask.sum(1)
    kept = (mean >= np.log(0.95)) & (mean <= np.log(1.1))
    assert 0 < kept.sum() < len(kept)
    losses = peer_verl.policy_loss(batch, "vanilla", low=0.2, high=0.3) * kept[:, None]
    assert loss_of(found, batch) == pytest.approx(peer_verl.aggregate(losses, batch.mask, "token-mean", 40), rel=1e-9)
    assert f"{CORRECTION}.rollout_rs" in told(found)


def told(found: ImportedRecipe) -> set[str]:
    return {one.key for one in found.unmapped if one.changes_meaning}


def advantages_of(found: ImportedRecipe, rewards: Any, groups: Any, batch: Batch) -> Any:
    """[B, T]: what the algorithm makes of a step's samples."""
    lengths = batch.mask.sum(1) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    inside = np.ones(offsets[-1], bool)
    inside[offsets[:-1]] = False
    columns = {WEIGHT_VERSIONS: np.where(inside, 0, -1).astype(np.int32)}
    for name, values in ((GENERATION_LOGPROBS, batch.rollout), (REFERENCE_LOGPROBS, batch.reference)):
        columns[name] = np.zeros(len(inside), np.float32)
        columns[name][inside] = values[batch.mask]
    tokens = TokenBatch(
        tokens=np.zeros(len(inside), np.int32),
        offsets=offsets,
        loss_mask=inside,
        token_columns=columns,
        sequence_columns={GROUP_IDS: groups.astype(np.int32)},
    )
    size = len(rewards)
    rollouts = RolloutBatch(
        batch=tokens, rewards=rewards.astype(np.float32), valid=np.ones(size, bool), finish_reasons=np.zeros(size, np.uint8)
    )
    context = AlgorithmContext(
        seed=0,
        samples_per_prompt=3,
        updates_per_step=1,
        temperature=1.0,
        generation_logprobs_exact=False,
        max_response_tokens=40,
    )
    built = Grpo(context, config_of(found)).build_batch(rollouts).batch.token_columns[ADVANTAGES]
    matrix = np.zeros(batch.mask.shape)
    matrix[batch.mask] = built[inside]
    return matrix


@pytest.mark.parametrize("coefficient", [0.0, 0.2])
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_are_verls(read: Read, batch: Batch, name: str, coefficient: float) -> None:
    """With a KL term in the reward where both can: told where verl divides what the term was taken off."""
    rewards, groups = np.array([1.0, 0.0, 0.5, 2.0, 0.0, 1.5]), np.array([0, 0, 0, 1, 1, 1])
    overrides = [f"algorithm.adv_estimator={name}", "algorithm.use_kl_in_reward=True"]
    found = read(*overrides, f"algorithm.kl_ctrl.kl_coef={coefficient}")
    kl = peer_verl.kl_estimate(batch.rollout, batch.reference, "kl")
    expected = peer_verl.advantages(rewards, groups, kl, batch.mask, name, coefficient)
    here = advantages_of(found, rewards, groups, batch)
    is_told = "algorithm.use_kl_in_reward" in told(found)
    assert is_told == (coefficient > 0 and name in ("grpo", "reinforce_plus_plus_baseline"))
    assert np.allclose(here, expected, rtol=1e-4, atol=1e-5) != is_told


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_estimator=rloo"], "reward"),
        (["algorithm.adv_estimator=grpo", "+algorithm.norm_adv_by_std_in_grpo=False"], "reward"),
        (["algorithm.adv_estimator=grpo"], "reward_to_go"),
        (["algorithm.adv_estimator=reinforce_plus_plus"], "reward_to_go"),
        (["algorithm.adv_estimator=grpo", f"{LOSS}.loss_mode=geo_mean"], None),
        (["algorithm.adv_estimator=gdpo"], None),
        (["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.kl_ctrl.kl_coef=0"], None),
    ],
)
def test_where_a_divergence_of_the_reward_goes(read: Read, overrides: list[str], expected: str | None) -> None:
    found = read("algorithm.use_kl_in_reward=True", *overrides)
    assert found.values.get("algorithm.grpo.kl_placement") == expected


def test_a_kl_type_with_a_plus_has_the_gradient_of_the_square(read: Read) -> None:
    found = read(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=low_var_kl+")
    assert (found.values["algorithm.grpo.kl_estimator"], found.values["algorithm.grpo.kl_gradient"]) == ("k2", "estimate")


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
def test_what_is_not_the_same_is_told(read: Read, override: str) -> None:
    others = ["algorithm.adv_estimator=reinforce_plus_plus", "+algorithm.gamma=0.9"] if "gamma" in override else [override]
    key = override.lstrip("+").split("=")[0]
    assert any(one == key or one.startswith(f"{key}.") for one in told(read(*others)))


DISTILLS = ["enabled=true", "teacher_models={t: {model_path: big}}", "distillation_loss.loss_mode=k1"]
DISTILLS += ["distillation_loss.use_task_rewards=false", "distillation_loss.use_policy_gradient=true"]


def test_distillation_by_the_reverse_divergence_is_the_algorithm_distill(read: Read) -> None:
    found = read(*(f"+distillation.{one}" for one in DISTILLS))
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
def test_other_distillation_is_refused_with_its_reason(read: Read, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: found"):
        read(*(f"+distillation.{one}" for one in DISTILLS), override)


@pytest.mark.parametrize("table", ["reward_model", "reward.reward_model"])
def test_rewards_of_a_model_are_its_environment(read: Read, table: str) -> None:
    path = "model.path" if table == "reward_model" else "model_path"
    found = read(f"+{table}.enable=true", f"+{table}.{path}=judge")
    assert found.values["environment.name"] == "reward_model"
    assert found.values["environment.reward_model.path"] == "judge"
    with pytest.raises(ConfigError, match=f"{table}.enable: found"):
        read(f"+{table}.enable=true")
