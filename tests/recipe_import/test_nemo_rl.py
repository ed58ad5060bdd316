"""NeMo-RL's recipes: keys have their meaning in a recipe, and those without a counterpart are reported."""

import math
import re
from pathlib import Path

import pytest

from rlcore.spi import ConfigError
from rlcore_import.nemo_rl import import_recipe
from rlcore_import.nemo_rl_keys import MAPPED

from .nemo_recipes import DPO, GRPO, SFT, grpo, imported, reported


def test_a_grpo_recipe_means_the_same(tmp_path: Path, valid) -> None:
    found = grpo(tmp_path)
    recipe = valid(found)
    assert (recipe.training.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.training.minibatches_per_step) == (
        16,
        8,
        2,
    )
    assert (recipe.rollout.max_prompt_tokens, recipe.rollout.max_response_tokens) == (256, 768)
    assert recipe.training.max_tokens_per_microbatch == 2048
    assert recipe.rollout.on_truncation == "mask"
    assert (recipe.rollout.temperature, recipe.evaluation.temperature) == (0.9, 0.9)
    assert (recipe.optimizer.learning_rate, recipe.optimizer.betas, recipe.optimizer.weight_decay) == (1e-6, (0.9, 0.95), 0.1)
    assert (recipe.schedule.warmup_steps, recipe.schedule.decay) == (26, "constant")
    assert (recipe.run.num_steps, recipe.run.seed, recipe.evaluation.every_n_steps) == (200, 7, 10)
    loss = recipe.algorithm.options["grpo"]
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.loss_normalisation) == (0.2, 0.28, None, "token")
    assert (loss.kl_coefficient, loss.kl_estimator, loss.kl_gradient) == (0.01, "k3", "expectation")
    assert (loss.advantage_baseline, loss.advantage_normalisation) == ("leave_one_out", "leave_one_out_std")
    assert (loss.importance_correction, loss.previous_logprobs) == ("none", "trainer")
    trainer = recipe.trainer.options["fsdp2"]
    assert (trainer.tensor_parallel, trainer.sequence_parallel, trainer.activation_checkpointing) == (2, False, True)
    assert recipe.generator.options["vllm"].tensor_parallel == 2
    assert (recipe.data.train.path, recipe.data.train.subset, recipe.data.train.prompt_field) == (
        "openai/gsm8k",
        "main",
        "question",
    )
    assert reported(found) == {
        "policy.max_total_sequence_length",
        "policy.scheduler",
        "policy.optimizer.kwargs.weight_decay",
        "grpo.max_num_epochs",
        "grpo.overlong_filtering",
        "grpo.adv_estimator.use_leave_one_out_baseline",
    }
    assert "policy.megatron_cfg.tensor_model_parallel_size" not in reported(found) | reported(found, changing=False)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("loss_fn.token_level_loss=false", "loss_normalisation", "sequence"),
        ("loss_fn.sequence_level_importance_ratios=true", "ratio", "sequence"),
        ("loss_fn.ratio_clip_c=3", "dual_clip", 3.0),
        ("loss_fn.use_cispo=true", "objective", "cispo"),
        ("loss_fn.disable_ppo_ratio=true", "objective", "policy_gradient"),
        ("loss_fn.use_on_policy_kl_approximation=true", "kl_importance", "generation"),
        ("grpo.normalize_rewards=false", "advantage_normalisation", "none"),
        ("grpo.use_leave_one_out_baseline=false", "advantage_normalisation", "std"),
        ("grpo.adv_estimator.name=reinforce_plus_plus", "advantage_normalisation", "batch_whitening"),
        ("grpo.adv_estimator.name=gdpo", "reward_aggregation", "normalise_then_sum"),
    ],
)
def test_options_of_the_loss_have_their_counterparts(tmp_path: Path, valid, override: str, key: str, expected: object) -> None:
    found = grpo(tmp_path, override)
    assert found.values[f"algorithm.grpo.{key}"] == expected
    valid(found)


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        ("null", ("null", "null"), {"importance_maximum": math.inf, "importance_bound": "truncate"}),
        ("null", ("null", "0.5"), {"importance_maximum": math.inf, "importance_minimum": 0.0}),
        ("tis", ("2.0", "null"), {"importance_maximum": 2.0, "importance_bound": "truncate"}),
        ("icepop", ("5.0", "0.5"), {"importance_maximum": 5.0, "importance_minimum": 0.5, "importance_bound": "mask"}),
        ("seq-mask-tis", ("1.1", "0.9"), {"geometric_maximum": 1.1, "geometric_minimum": 0.9, "importance_maximum": math.inf}),
    ],
)
def test_corrections_of_the_generator_keep_their_bounds(tmp_path: Path, valid, kind, bounds, expected) -> None:
    prefix = "loss_fn.truncated_importance_sampling"
    overrides = ["loss_fn.use_importance_sampling_correction=true", f"{prefix}_type={kind}"]
    found = grpo(tmp_path, *overrides, f"{prefix}_ratio={bounds[0]}", f"{prefix}_ratio_min={bounds[1]}")
    assert found.values["algorithm.grpo.importance_correction"] == "token"
    assert {key: found.values[f"algorithm.grpo.{key}"] for key in expected} == expected
    valid(found)


def test_what_has_no_counterpart_is_reported_with_its_value(tmp_path: Path) -> None:
    overrides = [
        "loss_fn.quantized_logprobs=true",
        "grpo.advantage_clip_low=-5",
        "policy.brand_new=3",
        "grpo.val_batch_size=8",
    ]
    found = grpo(tmp_path, *overrides)
    values = {one.key: (one.value, one.changes_meaning) for one in found.unmapped}
    assert values["loss_fn.quantized_logprobs"] == (True, True)
    assert values["grpo.advantage_clip_low"] == (-5, True)
    assert values["policy.brand_new"] == (3, True)
    assert values["grpo.val_batch_size"] == (8, False)
    changing = [one.changes_meaning for one in found.unmapped]
    assert changing == sorted(changing, reverse=True)


def test_what_is_switched_off_is_counted_alone(tmp_path: Path) -> None:
    before = grpo(tmp_path)
    found = grpo(tmp_path, "grpo.advantage_clip_low=null", "policy.draft={enabled: false, num_layers: 3}")
    assert reported(found) == reported(before)
    assert found.num_off == before.num_off + 3


def test_batches_that_are_not_whole_are_reported(tmp_path: Path) -> None:
    found = grpo(tmp_path, "policy.train_global_batch_size=48")
    assert found.values["training.minibatches_per_step"] == 2
    assert "policy.train_global_batch_size" in reported(found)
    assert "policy.train_global_batch_size" not in reported(grpo(tmp_path))


def test_asynchrony_and_generators_of_their_own(tmp_path: Path, valid) -> None:
    overrides = ["grpo.async_grpo={enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: true}"]
    overrides += ["policy.generation.colocated={enabled: false, resources: {gpus_per_node: 4, num_nodes: null}}"]
    found = grpo(tmp_path, *overrides, "loss_fn.use_importance_sampling_correction=true")
    recipe = valid(found)
    assert recipe.async_.max_staleness == 2
    assert (recipe.cluster.placement, recipe.cluster.generator_gpus_per_node) == ("separate", 4)
    assert recipe.generator.options["vllm"].replicas == 2
    several = grpo(tmp_path, *overrides, "cluster.num_nodes=4", "policy.generation.colocated.resources.num_nodes=1")
    assert several.values["cluster.generator_gpus_per_node"] == 2
    assert several.values["cluster.address"] == "auto"


def test_megatrons_keys(tmp_path: Path, valid) -> None:
    megatron = "{enabled: true, tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, sequence_parallel: true, "
    megatron += "activation_checkpointing: true, "
    megatron += "optimizer: {lr: 3e-7, min_lr: 3e-8, adam_beta2: 0.98, weight_decay: 0.2, clip_grad: 0.5}, "
    megatron += "scheduler: {lr_decay_style: cosine, lr_warmup_iters: 5, lr_decay_iters: 100}, freeze_moe_router: true}"
    found = grpo(tmp_path, f"policy.megatron_cfg={megatron}")
    recipe = valid(found)
    trainer = recipe.trainer.options["megatron"]
    assert (trainer.tensor_parallel, trainer.pipeline_parallel, trainer.sequence_parallel, trainer.recompute) == (
        4,
        2,
        True,
        "full",
    )
    assert (recipe.optimizer.learning_rate, recipe.optimizer.betas, recipe.optimizer.max_grad_norm) == (3e-7, (0.9, 0.98), 0.5)
    assert (recipe.schedule.warmup_steps, recipe.schedule.decay) == (10, "cosine")
    assert recipe.schedule.min_learning_rate_ratio == pytest.approx(0.1)
    assert {"policy.megatron_cfg.freeze_moe_router", "policy.megatron_cfg.scheduler.lr_decay_iters"} <= reported(found)


@pytest.mark.parametrize(
    ("text", "left_out", "expected"),
    [
        (GRPO, "loss_fn.reference_policy_kl_penalty", {"algorithm.grpo.kl_coefficient": 0.01}),
        (GRPO, "grpo.max_num_steps", {"run.num_steps": 1_000_000}),
        (GRPO, "grpo.val_period", {"evaluation.every_n_steps": 10, "evaluation.max_prompts": 256}),
        (SFT, "sft.max_num_steps", {"run.num_steps": 60}),
        (DPO, "dpo.max_num_steps", {"run.num_steps": 150}),
    ],
)
def test_a_key_that_is_left_out_has_nemo_rls_default(
    tmp_path: Path, text: str, left_out: str, expected: dict[str, object]
) -> None:
    found = grpo(tmp_path, f"~{left_out}") if text is GRPO else imported(tmp_path, text, f"~{left_out}")
    assert {key: found.values[key] for key in expected} == expected
    assert left_out not in reported(found)


def test_a_reward_model_has_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rm\.max_num_steps"):
        imported(tmp_path, DPO.replace("dpo:", "rm:"), "~rm.max_num_steps")


def test_demonstrations_and_preferences(tmp_path: Path, valid) -> None:
    found = imported(tmp_path, SFT)
    recipe = valid(found)
    assert (recipe.algorithm.name, recipe.training.prompts_per_step, recipe.data.train.messages_field) == ("sft", 64, "chat")
    assert "sft.only_unmask_final" in reported(found)
    recipe = valid(imported(tmp_path, DPO))
    assert (recipe.data.train.chosen_field, recipe.data.train.rejected_field) == ("good", "bad")
    loss = recipe.algorithm.options["dpo"]
    assert (loss.beta, loss.sft_coefficient, loss.length_normalised) == (0.1, 0.5, True)


def test_shaped_rewards_refills_and_adapters(tmp_path: Path, valid) -> None:
    shaping = "{enabled: true, overlong_buffer_length: 192, overlong_buffer_penalty: 0.5, max_response_length: 768}"
    lora = "{enabled: true, dim: 4, alpha: 8, target_modules: ['*q_proj'], match_all_linear: false}"
    found = grpo(
        tmp_path,
        f"grpo.reward_shaping={shaping}",
        "grpo.use_dynamic_sampling=true",
        f"policy.dtensor_cfg.lora_cfg={lora}",
    )
    recipe = valid(found)
    loss = recipe.algorithm.options["grpo"]
    assert (loss.length_penalty, loss.length_penalty_buffer, loss.length_penalty_weight) == ("soft_overlong", 0.25, 0.5)
    assert (recipe.rollout.dynamic_sampling, recipe.rollout.max_refill_ratio) == (True, 9.0)
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets) == (4, 8.0, ("q_proj",))


def test_recipes_inherit(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SFT)
    child = tmp_path / "child.yaml"
    child.write_text("defaults: base.yaml\nsft: {max_num_steps: 5}\npolicy: {scheduler: null}\n")
    found = import_recipe(child)
    assert found.values["run.num_steps"] == 5
    assert found.values["schedule.warmup_steps"] == 0


def test_a_table_with_the_mark_inherits_nothing(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SFT)
    child = tmp_path / "child.yaml"
    child.write_text("defaults: base.yaml\ndata: {_override_: true, train: {data_path: x.jsonl}}\n")
    found = import_recipe(child)
    assert (found.values["data.train.path"], found.values.get("data.train.messages_field")) == ("x.jsonl", None)
    assert not {key for key in reported(found) if "_override_" in key}


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("distillation: {topk_logits_k: 64}", "likeliest tokens"),
        ("ppo: {seed: 1}", "critic"),
        ("sft: {seed: 1}", "grpo and sft"),
    ],
)
def test_a_table_of_another_algorithm_is_refused_with_the_reason(tmp_path: Path, table: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        imported(tmp_path, f"{GRPO}\n{table}\n")


def test_a_reward_model_learns_from_pairs(tmp_path: Path, valid) -> None:
    found = imported(tmp_path, DPO.replace("\ndpo:", "\nrm:"), "~rm.reference_policy_kl_penalty", "rm.val_batches=2")
    recipe = valid(found)
    assert (recipe.algorithm.name, recipe.data.train.chosen_field, recipe.training.prompts_per_step) == (
        "bradley_terry",
        "good",
        64,
    )


@pytest.mark.parametrize("text", ["a: 1", "grpo: {}\n", "[1, 2]", "policy: {model_name: x}"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"theirs\.yaml"):
        imported(tmp_path, text)


NUMBERS = [
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "grpo.max_num_steps",
    "grpo.max_rollout_turns",
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.max_total_sequence_length",
    "policy.optimizer.kwargs.lr",
    "policy.dtensor_cfg.tensor_parallel_size",
    "policy.generation.max_new_tokens",
    "policy.generation.temperature",
    "policy.generation.vllm_cfg.tensor_parallel_size",
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "data.max_input_seq_length",
]


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan", "[1]", "{x: 1}", "ten", "true"])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_that_cannot_be_computed_with_name_their_key(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        grpo(tmp_path, f"{key}={value}")


@pytest.mark.parametrize("value", ["0", "-.inf", "[]", "{x: [1]}", "other"])
@pytest.mark.parametrize("first", range(0, len(MAPPED), 24))
def test_mapped_keys_of_any_value_are_imported_or_named(tmp_path: Path, first: int, value: str) -> None:
    """No other error: one that is raised elsewhere would end the command with a traceback."""
    keys = [key for key in [*MAPPED][first : first + 24] if not key.startswith(("sft.", "dpo.", "rm."))]
    found = []
    try:
        grpo(tmp_path, *(f"++{key}={value}" for key in keys))
    except ConfigError as error:
        found = [one.path for one in error.problems]
    assert not found or {*found} & {*keys}


@pytest.mark.parametrize(
    ("key", "value"), [("grpo.max_num_steps", "ten"), ("grpo.seed", "[1]"), ("policy.generation.temperature", "{}")]
)
def test_values_of_other_types_are_named(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        grpo(tmp_path, f"{key}={value}")
