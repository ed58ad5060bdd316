"""No importer writes what `check` refuses: whatever a recipe says is written, reported or refused with its key."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlcore.run.plan.prepare import prepare
from rlcore.spi import ConfigError
from rlcore_import.command import recipe_text
from rlcore_import.recipe import ImportedRecipe

from .nemo_recipes import DPO, SFT, grpo, imported

OF_MACHINES = (
    "with a vLLM that was built for cpu",
    "with no TransformerEngine",
    "TransformerEngine is not installed",
    "expected a model directory, or a name on the Hub",
    "has no list of servers",
    "a JSONL file of NeMo Gym",
)
"""Parts of problems that concern this machine, the model's files, or servers."""
CORRECTS = "loss_fn.use_importance_sampling_correction=true"
NO_CLIP = "loss_fn.ratio_clip_c=3"
GYM = ["data.default={env_name: nemo_gym}", "env={nemo_gym: {config_paths: []}}"]
TEACHER = "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: acme/teacher}}"
NEMO = {
    "reinforce": ["loss_fn.disable_ppo_ratio=true", NO_CLIP, "loss_fn.sequence_level_importance_ratios=true"],
    "cispo without bounds": ["loss_fn.use_cispo=true", "loss_fn.ratio_clip_min=2", "loss_fn.ratio_clip_max=0"],
    "on policy in several updates": ["loss_fn.force_on_policy_ratio=true", NO_CLIP],
    "gspo": ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false", CORRECTS],
    "kl in rewards of whole answers": [
        "grpo.adv_estimator={name: reinforce_plus_plus}",
        "loss_fn.use_kl_in_reward=true",
        "loss_fn.sequence_level_importance_ratios=true",
    ],
    "kl in rewards": ["grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}", "loss_fn.use_kl_in_reward=true"],
    "gdpo without deviations": ["grpo.adv_estimator={name: gdpo, normalize_rewards: false}"],
    "one sample": [
        "grpo.num_generations_per_prompt=1",
        "grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}",
    ],
    "stale samples without weights": ["grpo.async_grpo={enabled: true}"],
    "stale samples": [
        "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 3}",
        CORRECTS,
        "loss_fn.disable_ppo_ratio=true",
    ],
    "refills without rewards": ["data.default={env_name: vlm}", "env={vlm: {}}", "grpo.use_dynamic_sampling=true"],
    "agents": [*GYM, "grpo.overlong_filtering=true", "grpo.max_rollout_turns=5", "grpo.use_dynamic_sampling=true"],
    "a teacher": [
        TEACHER,
        "grpo.use_dynamic_sampling=true",
        "grpo.num_generations_per_prompt=1",
        "grpo.async_grpo={enabled: true}",
    ],
    "a teacher of agents": [TEACHER, *GYM],
    "a reward model": ["data.default={env_name: reward_model}", "env={reward_model: {model_name: acme/judge}}"],
    "a part of the distribution": ["policy.generation.top_p=0.9", "policy.generation.top_k=20"],
    "a short buffer": ["grpo.reward_shaping={enabled: true, overlong_buffer_length: 9999, max_response_length: 512}"],
    "unequal updates": ["policy.train_global_batch_size=24"],
    "machines that do not divide": [
        "cluster.num_nodes=3",
        "policy.generation.colocated={enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}",
        "policy.megatron_cfg={enabled: true, tensor_model_parallel_size: 8, pipeline_model_parallel_size: 2}",
    ],
}


@pytest.fixture
def problems(tmp_path: Path) -> Callable[[ImportedRecipe], list[str]]:
    """A function that returns the problems `check` finds in an imported recipe."""

    def check(found: ImportedRecipe) -> list[str]:
        file = tmp_path / "recipe.toml"
        file.write_text(recipe_text(found, "a test"))
        try:
            prepare(file)
        except ConfigError as error:
            return [str(one) for one in error.problems if not any(words in str(one) for words in OF_MACHINES)]
        return []

    return check


@pytest.mark.skipif(find_spec("vllm") is None, reason="the recipes name vLLM")
@pytest.mark.wide(sample=8)
@pytest.mark.parametrize("overrides", NEMO.values(), ids=NEMO)
def test_check_finds_nothing_wrong(tmp_path: Path, problems, overrides: list[str]) -> None:
    assert problems(grpo(tmp_path, *overrides)) == []


@pytest.mark.parametrize("text", [SFT, DPO, DPO.replace("\ndpo:", "\nrm:")], ids=["sft", "dpo", "rm"])
def test_nor_without_samples(tmp_path: Path, problems, text: str) -> None:
    others = ["~rm.reference_policy_kl_penalty", "~rm.sft_loss_weight"] if "\nrm:" in text else []
    assert problems(imported(tmp_path, text, *others)) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["grpo.num_generations_per_prompt=1"], "grpo.num_generations_per_prompt"),
        (["loss_fn.ratio_clip_c=1"], "loss_fn.ratio_clip_c"),
        (["loss_fn.use_cispo=true", NO_CLIP], "loss_fn.ratio_clip_c"),
        (
            [
                CORRECTS,
                "loss_fn.truncated_importance_sampling_type=tis",
                "loss_fn.truncated_importance_sampling_ratio=1",
                "loss_fn.truncated_importance_sampling_ratio_min=1",
            ],
            "loss_fn.truncated_importance_sampling_ratio",
        ),
        ([CORRECTS, "loss_fn.truncated_importance_sampling_type=brand_new"], "loss_fn.truncated_importance_sampling_type"),
        (["loss_fn.reference_policy_kl_type=k4"], "loss_fn.reference_policy_kl_type"),
        (["grpo.adv_estimator={name: brand_new}"], "grpo.adv_estimator.name"),
        (["policy.tokenizer.chat_template=''"], "policy.tokenizer.chat_template"),
        (["policy.dtensor_cfg.tensor_parallel_size=3"], "policy.dtensor_cfg.tensor_parallel_size"),
        (["policy.dtensor_cfg.expert_parallel_size=3"], "policy.dtensor_cfg.expert_parallel_size"),
        (
            ["policy.megatron_cfg={enabled: true, pipeline_model_parallel_size: 3}"],
            "policy.megatron_cfg.tensor_model_parallel_size",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(tmp_path: Path, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        grpo(tmp_path, *overrides)
