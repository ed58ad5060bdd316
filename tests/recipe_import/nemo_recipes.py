"""Small recipes in NeMo-RL's form, and functions that import them."""

from pathlib import Path

from rlcore_import.nemo_rl import import_recipe
from rlcore_import.recipe import ImportedRecipe

POLICY = """
policy:
  model_name: acme/small
  tokenizer: {name: "${policy.model_name}", chat_template: default}
  train_global_batch_size: 64
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  precision: bfloat16
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, sequence_parallel: false, activation_checkpointing: true}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 8}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1e-6, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 13}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 100000}}
    - milestones: [13]
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
GRPO = (
    POLICY
    + """
grpo:
  num_prompts_per_step: 16
  num_generations_per_prompt: 8
  max_num_steps: 200
  max_num_epochs: 1
  seed: 7
  normalize_rewards: true
  use_leave_one_out_baseline: true
  overlong_filtering: true
  val_period: 10
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn:
  reference_policy_kl_penalty: 0.01
  reference_policy_kl_type: k3
  ratio_clip_min: 0.2
  ratio_clip_max: 0.28
  ratio_clip_c: null
  token_level_loss: true
  use_importance_sampling_correction: false
data:
  max_input_seq_length: 256
  train: {dataset_name: gsm8k, split: train}
  validation: {dataset_name: AIME2024}
  default: {env_name: math}
"""
)
GENERATION = """
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 0.9
    val_temperature: ${.temperature}
    vllm_cfg: {tensor_parallel_size: 2, gpu_memory_utilization: 0.6}
    colocated: {enabled: true}
"""
SFT = (
    POLICY
    + """
sft: {max_num_steps: 60, val_period: 0, seed: 1, only_unmask_final: true}
data:
  max_input_seq_length: 1024
  train: {data_path: ./rows.jsonl, chat_key: chat}
"""
)
DPO = (
    POLICY
    + """
dpo: {max_num_steps: 50, reference_policy_kl_penalty: 0.1, sft_loss_weight: 0.5, preference_average_log_probs: true}
data:
  train: {data_path: ./pairs.jsonl, chosen_key: good, rejected_key: bad}
"""
)


def imported(tmp_path: Path, text: str, *overrides: str) -> ImportedRecipe:
    """The recipe of a file with that text."""
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    return import_recipe(file, overrides)


def grpo(tmp_path: Path, *overrides: str) -> ImportedRecipe:
    """GRPO with samples."""
    policy, _, rest = GRPO.partition("cluster:")
    return imported(tmp_path, f"{policy}{GENERATION}cluster:{rest}", *overrides)


def reported(found: ImportedRecipe, *, changing: bool = True) -> set[str]:
    """Return the reported keys that change what is trained, or those that do not."""
    return {one.key for one in found.unmapped if one.changes_meaning is changing}
