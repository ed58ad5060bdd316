"""The rate at each step, the layouts of verl's engines, adapters and sampling."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import ConfigError, ScheduleSpec
from rlcore_import.recipe import ImportedRecipe
from rlcore_import.verl import import_recipe

from . import peer_verl

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CONFIG = """
data: {train_batch_size: 64, max_prompt_length: 512, max_response_length: 1024, train_files: t.parquet}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: acme/small}
  actor: {strategy: fsdp, ppo_mini_batch_size: 16, optim: {lr: 1e-6}}
  rollout: {name: vllm, n: 4}
trainer: {total_training_steps: 40, nnodes: 2, n_gpus_per_node: 8}
"""
Read = Callable[..., ImportedRecipe]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    file = tmp_path_factory.mktemp("verl") / "ppo.yaml"
    file.write_text(CONFIG)
    return lambda *overrides: import_recipe(Path(file), overrides)


def reported(found: ImportedRecipe) -> set[str]:
    return {one.key for one in found.unmapped}


def optim(**options: Any) -> list[str]:
    return [f"++{ACTOR}.optim.{key}={value}" for key, value in options.items()]


@pytest.mark.parametrize(
    ("strategy", "options", "theirs"),
    [
        ("fsdp", {}, {}),
        ("fsdp", {"lr_warmup_steps": 10}, {"warmup": 10}),
        ("fsdp", {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.11}, {"warmup": 4}),
        ("fsdp2", {"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.5}, {"warmup": 20}),
        (
            "fsdp",
            {"lr_scheduler_type": "cosine", "lr_warmup_steps": 4, "min_lr_ratio": 0.1},
            {"warmup": 4, "kind": "cosine", "least": 0.1},
        ),
        ("fsdp", {"warmup_style": "cosine", "lr_scheduler_type": "constant"}, {"kind": "cosine"}),
        (
            "megatron",
            {"lr_decay_style": "linear", "min_lr": 2e-7, "lr_warmup_steps": 8},
            {"warmup": 8, "kind": "linear", "least": 0.2},
        ),
        ("megatron", {"lr_decay_style": "cosine", "min_lr_ratio": 0.9}, {"kind": "cosine"}),  # FSDP's key
        ("veomni", {"lr_scheduler_type": "cosine", "lr_min": 5e-7, "lr_warmup_steps": 9}, {"kind": "cosine", "least": 0.5}),
        ("veomni", {"lr_warmup_steps_ratio": 0.25}, {"kind": "cosine", "warmup": 10}),
        ("torchtitan", {"lr_warmup_steps": 2, "min_lr_factor": 0.3}, {"warmup": 2, "kind": "linear", "least": 0.3}),
    ],
)
def test_the_rate_at_each_step_is_verls(read: Read, strategy: str, options: dict[str, Any], theirs: dict[str, Any]) -> None:
    """verl's steps are training steps, of four updates here: the rate of a step's first update is verl's of the step, within
    a warm-up that of its last is verl's of the next step."""
    found = read(f"{ACTOR}.strategy={strategy}", *optim(**options))
    schedule = ScheduleSpec(
        **{key.partition(".")[2]: value for key, value in found.values.items() if key.startswith("schedule.")}
    )
    updates, warmup = found.values["training.minibatches_per_step"], theirs.get("warmup", 0)
    assert (updates, found.values["run.num_steps"]) == (4, 40)
    for step in range(40):
        update = (step + 1) * updates - 1 if step < warmup else step * updates
        expected = peer_verl.rate(step + (step < warmup), **{"warmup": 0, "steps": 40, **theirs})
        assert schedule.share(update, 40 * updates) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"lr_scheduler_type": "cosine", "num_cycles": 1.5},
        {"lr_warmup_init": 1e-7},
        {"lr_start": 1e-7},
        {"zero_indexed_step": False},
        {"optimizer": "Adam8bit"},
        {"optimizer_impl": "torchao.optim"},
        {"override_optimizer_config": "{eps: 1e-5}"},
        {"weight_decay_incr_style": "cosine"},
        {"exp_avg_dtype": "bf16"},
        {"lr_scheduler_type": "polynomial"},
    ],
)
def test_what_changes_the_rate_or_the_optimizer_is_reported(read: Read, options: dict[str, Any]) -> None:
    found = read(*optim(**options))
    keys = {one.key for one in found.unmapped if one.changes_meaning}
    assert any(f"{ACTOR}.optim.{name}" in key for key in keys for name in options)


def test_moments_of_torchao_are_in_8_bits(read: Read) -> None:
    found = read(*optim(optimizer="AdamW8bit", optimizer_impl="torchao.optim"))
    assert found.values["optimizer.moments"] == "8bit"
    assert not {f"{ACTOR}.optim.optimizer", f"{ACTOR}.optim.optimizer_impl"} & reported(found)


@pytest.mark.parametrize(
    ("options", "scale", "keys"),
    [
        ({}, "match_rms_adamw", {"muon_scale_mode"}),
        ({"muon_extra_scale_factor": 0.2, "muon_tp_mode": "duplicated"}, "match_rms_adamw", set()),
        ({"muon_scale_mode": "shape_scaling", "muon_split_qkv": "false"}, "original", {"muon_split_qkv"}),
        ({"muon_match_adamw_update_rms": "true"}, "match_rms_adamw", {"muon_scale_mode"}),
        (
            {"muon_match_adamw_update_rms": "true", "muon_scale_mode": "shape_scaling"},
            "original",
            {"muon_scale_mode"},
        ),
        ({"muon_extra_scale_factor": 0.2, "muon_scalar_optimizer": "lion"}, "match_rms_adamw", {"muon_scalar_optimizer"}),
    ],
)
def test_muon_is_muon(read: Read, options: dict[str, Any], scale: str, keys: set[str]) -> None:
    found = read(f"{ACTOR}.strategy=megatron", *optim(optimizer="muon", **options))
    assert (found.values["optimizer.name"], found.values["optimizer.muon.scale"]) == ("muon", scale)
    assert found.values["optimizer.muon.nesterov"] is False
    different = {one.key for one in found.unmapped if one.changes_meaning}
    assert {f"{ACTOR}.optim.{key}" for key in keys} == {key for key in different if "muon" in key}
    assert "optimizer.muon.scale" not in read(*optim(**options)).values


def test_factor_of_muon_that_matches_adamw_is_verls(read: Read) -> None:
    """verl takes √((1 - β₁) / (1 + β₁))."""
    found = read(f"{ACTOR}.strategy=megatron", *optim(optimizer="muon", muon_match_adamw_update_rms="true"))
    (why,) = (one.why for one in found.unmapped if one.key.endswith("muon_scale_mode"))
    assert "0.229416" in why


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_tensor_ranks_change_the_meaning(read: Read, ranks: int) -> None:
    overrides = [f"{ACTOR}.strategy=megatron", f"++{ACTOR}.megatron.tensor_model_parallel_size={ranks}"]
    found = read(*overrides, *optim(optimizer="muon"))
    (one,) = (one for one in found.unmapped if one.key.endswith("muon_tp_mode"))
    assert one.changes_meaning is (ranks > 1)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"muon_momentum": 1.0}, "muon_momentum"),
        ({"muon_num_ns_steps": 120}, "muon_num_ns_steps"),
        ({"muon_match_adamw_update_rms": "true", "muon_extra_scale_factor": 0.2}, "muon_match_adamw_update_rms"),
    ],
)
def test_options_that_muon_cannot_have_are_refused(read: Read, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read(f"{ACTOR}.strategy=megatron", *optim(optimizer="muon", **options))


@pytest.mark.parametrize(
    ("policys", "critics", "expected", "is_reported"),
    [
        ("muon", "muon", {}, False),
        ("muon", "AdamW", {"critic.name": "adamw"}, False),
        ("AdamW", "muon", {"critic.name": "muon", "optimizer.muon.momentum": 0.9}, False),
        ("AdamW", "AdamW8bit", {"critic.moments": "8bit"}, False),
        ("muon", "muon", {}, True),
    ],
)
def test_critic_has_its_own_optimizer(
    read: Read, policys: str, critics: str, expected: dict[str, Any], is_reported: bool
) -> None:
    options = ["algorithm.adv_estimator=gae", f"{ACTOR}.strategy=megatron", *optim(optimizer=policys, muon_momentum=0.9)]
    options += [f"++critic.optim.optimizer={critics}", f"++critic.optim.muon_momentum={0.8 if is_reported else 0.9}"]
    found = read(*options)
    kinds = {key: value for key, value in found.values.items() if key in ("critic.name", "critic.moments")}
    assert kinds == {key: value for key, value in expected.items() if key.startswith("critic")}
    assert found.values | expected == found.values
    assert ("critic.optim.optimizer" in reported(found)) is is_reported


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"lr_warmup_steps": 10}, "lr_warmup_steps"),
        ({"lr_warmup_steps_ratio": 0.1}, "lr_warmup_steps_ratio"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type"),
        ({"weight_decay": 0.01}, "weight_decay"),
    ],
)
def test_rates_that_move_once_a_step_and_decay_of_biases_are_reported(read: Read, options: dict[str, Any], key: str) -> None:
    plain = read(*optim(weight_decay=0))
    assert not any(one.key.startswith(f"{ACTOR}.optim") and one.changes_meaning for one in plain.unmapped)
    found = read(*optim(**{"weight_decay": 0, **options}))
    assert {f"{ACTOR}.optim.{key}"} == {one.key for one in found.unmapped if one.changes_meaning and "optim." in one.key}


@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "torchtitan"])
@pytest.mark.parametrize(("options", "warmup"), [({"lr_warmup_steps": 10}, 10), ({"lr_warmup_steps_ratio": 0.25}, 40)])
def test_separate_trainers_count_updates(read: Read, strategy: str, options: dict[str, Any], warmup: int) -> None:
    mode = ["+trainer.use_v1=true", "+trainer.v1.trainer_mode=separate_async"]
    decay = {"lr_scheduler_type": "cosine", "lr_decay_style": "cosine", "decay_type": "cosine"}
    found = read(f"{ACTOR}.strategy={strategy}", *mode, *optim(**decay, **options))
    assert found.values["schedule.warmup_steps"] == warmup  # of 40 steps of 4 updates
    whys = {one.why for one in found.unmapped if one.key.startswith(f"{ACTOR}.optim")}
    assert not [why for why in whys if "once a training step" in why]
    older = read(f"{ACTOR}.strategy={strategy}", mode[1], *optim(**options))
    assert older.values["schedule.warmup_steps"] == (40 if warmup == 10 else warmup)


@pytest.mark.parametrize(("strategy", "betas", "is_reported"), [("fsdp", [0.9, 0.95], False), ("megatron", [0.9, 0.999], True)])
def test_betas_are_those_that_the_engine_gets(read: Read, strategy: str, betas: list[float], is_reported: bool) -> None:
    """verl's OptimizerConfig of Megatron has no betas."""
    found = read(f"{ACTOR}.strategy={strategy}", *optim(betas=[0.9, 0.95]))
    assert found.values["optimizer.betas"] == betas
    assert (f"{ACTOR}.optim.betas" in reported(found)) is is_reported
    assert f"{ACTOR}.optim.betas" not in reported(read(f"{ACTOR}.strategy={strategy}", *optim(betas=[0.9, 0.999])))


@pytest.mark.parametrize(
    ("override", "is_reported"),
    [("algorithm.use_kl_in_reward=true", True), (f"{ACTOR}.use_kl_loss=true", True), (f"{ACTOR}.use_kl_loss=false", False)],
)
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_a_reference_without_the_first_adapters_is_reported(
    read: Read, strategy: str, override: str, is_reported: bool
) -> None:
    prefix = f"++{MODEL}.lora" if strategy == "megatron" else f"++{MODEL}"
    names = ("rank", "adapter_path") if strategy == "megatron" else ("lora_rank", "lora_adapter_path")
    adapters = [f"{prefix}.{name}={value}" for name, value in zip(names, (8, "first"), strict=True)]
    found = read(f"{ACTOR}.strategy={strategy}", *adapters, f"++{override}")
    assert found.values["lora.init_from"] == "first"
    keys = {one.key for one in found.unmapped if "the reference begins with these adapters" in one.why}
    assert keys == ({f"{prefix[2:]}.{names[1]}"} if is_reported else set())


def test_an_engine_that_nobody_knows_is_reported_as_one_that_trains_otherwise(read: Read) -> None:
    found = read(f"{ACTOR}.strategy=automodel")
    assert f"{ACTOR}.strategy" in {one.key for one in found.unmapped if one.changes_meaning}


@pytest.mark.parametrize(
    ("overrides", "prompts"),
    [
        ([], 32),
        (["+trainer.use_v1=false"], 32),
        (["+trainer.use_v1=true"], 64),
        (["+algorithm.filter_groups={enable: true, metric: score}"], 64),
        (["+async_training.staleness_threshold=0"], 64),
    ],
)
def test_the_older_trainer_draws_a_step_of_its_own_size(read: Read, overrides: list[str], prompts: int) -> None:
    found = read("+data.gen_batch_size=32", *overrides)
    assert (found.values["training.prompts_per_step"], found.values["training.minibatches_per_step"]) == (
        prompts,
        prompts // 16,
    )


def test_megatrons_ratio_of_warm_up_is_one_of_the_decay(read: Read) -> None:
    options = optim(lr_warmup_steps_ratio=0.1, lr_decay_steps=100)
    assert read(f"{ACTOR}.strategy=megatron", *options).values["schedule.warmup_steps"] == 10 * 4
    assert read(*options).values["schedule.warmup_steps"] == 4 * 4


def test_a_decay_that_ends_before_or_behind_the_run_is_reported(read: Read) -> None:
    overrides = [f"{ACTOR}.strategy=megatron", *optim(lr_decay_style="cosine", lr_decay_steps=100)]
    assert f"{ACTOR}.optim.lr_decay_steps" in reported(read(*overrides))


@pytest.mark.parametrize(
    ("strategy", "overrides", "expected"),
    [
        ("fsdp", ["fsdp_config.ulysses_sequence_parallel_size=4"], {"fsdp2.context_parallel": 4}),
        ("fsdp2", ["ulysses_sequence_parallel_size=2"], {"fsdp2.context_parallel": 2}),
        (
            "fsdp",
            ["ulysses_sequence_parallel_size=2", "fsdp_config.ulysses_sequence_parallel_size=4"],
            {"fsdp2.context_parallel": 2},  # verl's older key overrules
        ),
        ("fsdp", ["fsdp_config.fsdp_size=8"], {"fsdp2.replicate": 2}),
        ("fsdp", ["fsdp_config.fsdp_size=-1"], {"fsdp2.replicate": None}),
        ("fsdp", ["fsdp_config.fsdp_size=16"], {"fsdp2.replicate": None}),
        ("fsdp", ["fsdp_config.offload_policy=true"], {"fsdp2.cpu_offload": True}),
        ("fsdp", ["freeze_vision_tower=true"], {"fsdp2.freeze": "vision"}),
        (
            "fsdp_turbo",
            [
                "fsdp_config.turbo_config.distributed.ulysses_parallel_size=4",
                "fsdp_config.turbo_config.distributed.expert_parallel_size=2",
            ],
            {"fsdp2.context_parallel": 4, "fsdp2.expert_parallel": 2},
        ),
        (
            "veomni",
            ["veomni.ulysses_parallel_size=2", "veomni.expert_parallel_size=4", "veomni.fsdp_size=8"],
            {"fsdp2.context_parallel": 2, "fsdp2.expert_parallel": 4, "fsdp2.replicate": 2},
        ),
        (
            "torchtitan",
            [
                "torchtitan.tensor_parallel_size=2",
                "torchtitan.context_parallel_size=4",
                "torchtitan.expert_parallel_size=2",
                "torchtitan.data_parallel_replicate_size=2",
            ],
            {"fsdp2.tensor_parallel": 2, "fsdp2.context_parallel": 4, "fsdp2.expert_parallel": 2, "fsdp2.replicate": 2},
        ),
        (
            "megatron",
            ["megatron.tensor_model_parallel_size=2", "megatron.expert_model_parallel_size=4"],
            {"megatron.tensor_parallel": 2, "megatron.expert_parallel": 4, "megatron.expert_tensor_parallel": 2},
        ),
        (
            "megatron",
            ["megatron.override_transformer_config.recompute_granularity=selective"],
            {"megatron.recompute": "selective"},
        ),
        ("megatron", ["freeze_vision_tower=true"], {"megatron.freeze": "vision"}),
    ],
)
def test_layouts_are_those_of_the_engine(read: Read, strategy: str, overrides: list[str], expected: dict[str, Any]) -> None:
    found = read(f"{ACTOR}.strategy={strategy}", *(f"++{ACTOR}.{one}" for one in overrides))
    assert {key: found.values.get(f"trainer.{key}") for key in expected} == expected


def test_shards_that_do_not_go_with_the_layout_are_reported(read: Read) -> None:
    found = read(f"+{ACTOR}.fsdp_config.fsdp_size=5")
    assert f"{ACTOR}.fsdp_config.fsdp_size" in reported(found)
    assert "trainer.fsdp2.replicate" not in found.values


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ([f"++{ACTOR}.grad_clip=0.5", f"++{ACTOR}.optim.clip_grad=2.0"], 0.5),
        (["++model_engine=dp", f"++{ACTOR}.optim.clip_grad=2.0"], 2.0),
    ],
)
def test_gradients_are_clipped_where_verls_engine_reads_it(read: Read, head: list[str], expected: float) -> None:
    assert read(*head).values["optimizer.max_grad_norm"] == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lora_rank=8", "lora_alpha=64"], {"rank": 8, "alpha": 64.0, "targets": ["all-linear"]}),
        (
            ["lora_rank=8", "target_modules=[q_proj,v_proj]", "lora_adapter_path=/a"],
            {"targets": ["q_proj", "v_proj"], "init_from": "/a"},
        ),
        (["lora_rank=0", "lora_alpha=64"], {"rank": None}),
        (["lora.rank=16"], {"rank": None}),  # FSDP reads lora_rank
    ],
)
def test_adapters_of_fsdp(read: Read, overrides: list[str], expected: dict[str, Any]) -> None:
    found = read(*(f"++{MODEL}.{one}" for one in overrides))
    assert {key: found.values.get(f"lora.{key}") for key in expected} == expected


def test_adapters_of_megatron_are_those_of_the_parts_of_its_layers(read: Read) -> None:
    overrides = [
        f"{ACTOR}.strategy=megatron",
        f"+{MODEL}.lora={{rank: 8, alpha: 16, target_modules: [linear_qkv, linear_proj]}}",
    ]
    found = read(*overrides)
    assert found.values["lora.targets"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (found.values["lora.rank"], found.values["lora.alpha"]) == (8, 16.0)
    assert f"{MODEL}.lora.target_modules" in reported(found)


def test_adapters_of_fsdp_are_none_with_megatron(read: Read) -> None:
    found = read(f"{ACTOR}.strategy=megatron", f"+{MODEL}.lora_rank=8")
    assert "lora.rank" not in found.values
    assert f"{MODEL}.lora_rank" in reported(found)


def test_adapters_to_begin_with_are_reported_where_there_are_none(read: Read) -> None:
    assert f"{MODEL}.lora_adapter_path" in reported(read(f"+{MODEL}.lora_adapter_path=/a"))


@pytest.mark.parametrize(
    "name", ["repetition_penalty=1.1", "min_p=0.05", "ignore_eos=true", "do_sample=false", "presence_penalty=0.3"]
)
def test_how_samples_are_drawn_is_reported(read: Read, name: str) -> None:
    found = read(f"+{ROLLOUT}.{name}")
    assert f"{ROLLOUT}.{name.partition('=')[0]}" in {one.key for one in found.unmapped if one.changes_meaning}
    neutral = read(f"+{ROLLOUT}.repetition_penalty=1.0", f"+{ROLLOUT}.min_p=0.0", f"+{ROLLOUT}.do_sample=true")
    assert not any(one.key.startswith(ROLLOUT) and one.changes_meaning for one in neutral.unmapped)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"{ACTOR}.optim.lr=0", f"{ACTOR}.optim.lr"),
        (f"{ACTOR}.optim.lr=.inf", f"{ACTOR}.optim.lr"),
        (f"+{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature"),
        (f"+{ROLLOUT}.top_p=1.5", f"{ROLLOUT}.top_p"),
        (f"+{ROLLOUT}.gpu_memory_utilization=0", f"{ROLLOUT}.gpu_memory_utilization"),
        (f"{ACTOR}.ppo_mini_batch_size=0", f"{ACTOR}.ppo_mini_batch_size"),
        (f"{ACTOR}.ppo_mini_batch_size=.inf", f"{ACTOR}.ppo_mini_batch_size"),
        ("data.train_batch_size=-4", "data.train_batch_size"),
        ("data.max_response_length=0.5", "data.max_response_length"),
        ("trainer.total_training_steps=.nan", "trainer.total_training_steps"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node"),
        (f"{ROLLOUT}.n={{x: 1}}", f"{ROLLOUT}.n"),
        (f"+{ACTOR}.use_kl_loss=perhaps", f"{ACTOR}.use_kl_loss"),
        (f"+{ACTOR}.loss_agg_mode=median", f"{ACTOR}.loss_agg_mode"),
        (f"+{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=0", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
        (
            "+algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 0}",
            "algorithm.rollout_correction.rollout_is_threshold",
        ),
        (f"{MODEL}.path=null", f"{MODEL}.path"),
        ("+trainer.val_only=true", "trainer.val_only"),
        (f"+{ACTOR}.optim.betas=[0.9,.nan]", f"{ACTOR}.optim.betas"),
        (
            f"+{ACTOR}.policy_loss={{loss_mode: clip_cov, clip_cov_lb: 5.0, clip_cov_ub: 1.0}}",
            f"{ACTOR}.policy_loss.clip_cov_lb",
        ),
        (f"+{ACTOR}.policy_loss={{loss_mode: kl_cov, ppo_kl_coef: -1}}", f"{ACTOR}.policy_loss.ppo_kl_coef"),
    ],
)
def test_values_that_no_run_can_have_name_their_key(read: Read, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: found"):
        read(override)


def test_masters_in_fewer_bits_are_reported(read: Read) -> None:
    assert f"{ACTOR}.fsdp_config.model_dtype" in reported(read(f"+{ACTOR}.fsdp_config.model_dtype=bf16"))
    assert f"{ACTOR}.fsdp_config.model_dtype" not in reported(read(f"+{ACTOR}.fsdp_config.model_dtype=fp32"))
    assert math.isclose(read().values["optimizer.learning_rate"], 1e-6)


@pytest.mark.parametrize(
    "table", ["critic.fsdp", "critic.model.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.megatron"]
)
def test_numbers_of_critic_and_reference_are_not_called_speed(read: Read, table: str) -> None:
    found = read("algorithm.adv_estimator=gae", f"+{table}.dtype=float16", f"+{table}.seed=7")
    whys = {one.key: one for one in found.unmapped}
    assert whys[f"{table}.dtype"].changes_meaning
    assert "the same but for chance" in whys[f"{table}.seed"].why
