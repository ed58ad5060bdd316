"""All of NeMo-RL's keys without a counterpart, each with the reason, at the commit in tests/recipe_import."""

from rlcore_import.nemo_rl_data_rows import DATA_ROWS, ENVIRONMENT_ROWS
from rlcore_import.nemo_rl_generation_rows import GENERATION_ROWS
from rlcore_import.nemo_rl_policy_rows import POLICY_ROWS
from rlcore_import.nemo_rl_reasons import DTENSOR, GEN, LOGS, MEGATRON, SPEED, UNREAD, WRITTEN
from rlcore_import.source import Dropped, rows

MOPD = "[reference] is one teacher, in the policy's layout"
FAILURES = "what follows on failures alone: see rollout.on_environment_error and cluster.max_engine_restarts"
EPOCHS = "a run has run.num_steps; its data begin anew as often as these need"
PENALTY = "no such penalty of rewards"
RANGE = "rewards are not mapped to another range"
OPEN_TABLES = (
    "logger.wandb",
    "logger.swanlab",
    "logger.mlflow",
    "logger.tensorboard",
    "_teachers",
    "env.sliding_puzzle_game",
    "on_policy_distillation.non_colocated_teachers",
    "policy.hf_config_overrides",
    f"{MEGATRON}.model_overrides",
    f"{MEGATRON}.freeze_config",
    f"{MEGATRON}.env_vars",
    f"{DTENSOR}.env_vars",
    f"{GEN}.vllm_cfg.env_vars",
    f"{GEN}.vllm_cfg.http_server_serving_chat_kwargs",
    f"{GEN}.mcore_generation_config",
    f"{GEN}.sglang_cfg",
    f"{GEN}.trtllm_cfg",
    f"{GEN}.trtllm_kwargs",
    f"{GEN}.dynamo_cfg",
)
"""Tables of logs, of engines, and those that NeMo-RL passes on: the importer lists each key that a recipe sets there."""
_RUN = (
    *rows("a value for references", "sif_dir"),
    *rows(SPEED, "data_plane on_policy_distillation"),
    *rows(SPEED, "enabled impl backend storage_capacity num_storage_units claim_meta_poll_interval_s", prefix="data_plane"),
    *rows(SPEED, "global_segment_size local_buffer_size", prefix="data_plane"),
    *rows(SPEED, "master_port_range_low master_port_range_high segment_size", prefix="cluster"),
    *rows("the newest checkpoints are kept, not the best", "metric_name higher_is_better", prefix="checkpointing"),
    *rows(WRITTEN, "model_save_format save_consolidated save_optimizer model_cache_dir", prefix="checkpointing"),
    *rows(WRITTEN, "model_repo_id is_peft is_async", prefix="checkpointing"),
    *rows("checkpoint.every_n_steps alone decides when", "checkpoint_must_save_by ft_keep_latest_k", prefix="checkpointing"),
    *rows("checkpoint.every_n_steps alone decides when", "ft_save_period", prefix="checkpointing"),
    *rows(EPOCHS, "max_num_epochs", prefix="sft", changes_meaning=True),
    *rows(EPOCHS, "max_num_epochs", prefix="dpo", changes_meaning=True),
    *rows(EPOCHS, "max_num_epochs", prefix="rm", changes_meaning=True),
    *rows(SPEED, "val_micro_batch_size", prefix="sft"),
    *rows(SPEED, "val_micro_batch_size", prefix="dpo"),
    *rows(SPEED, "val_micro_batch_size", prefix="rm"),
    *rows(
        "all messages of the assistant are learned, not the final one alone",
        "only_unmask_final",
        prefix="sft",
        changes_meaning=True,
    ),
    *rows(LOGS, "log_dir num_val_samples_to_print monitor_gpus wandb_enabled mlflow_enabled", prefix="logger"),
    *rows(LOGS, "swanlab_enabled tensorboard wandb.* swanlab.* mlflow.* tensorboard.*", prefix="logger"),
    *rows(LOGS, "gpu_monitoring.collection_interval gpu_monitoring.flush_interval", prefix="logger"),
    *rows("a value for references", "*", prefix="_teachers"),
)
_GRPO = (
    *rows(EPOCHS, "max_num_epochs", prefix="grpo", changes_meaning=True),
    *rows(SPEED, "val_batch_size calculate_advantages_on_gpu deduplicate_multimodal_data", prefix="grpo"),
    *rows(SPEED, "debug_payload_metrics async_grpo", prefix="grpo"),
    *rows("evaluation begins with evaluation.every_n_steps", "val_start_at", prefix="grpo", neutral=(-1,)),
    *rows("a run has run.num_steps", "stop_at_validation_metric", prefix="grpo", changes_meaning=True),
    *rows("a run has run.num_steps", "stop_at_validation_threshold", prefix="grpo", changes_meaning=True),
    *rows("groups are replaced one by one, as they are needed", "batch_multiplier", prefix="grpo", neutral=(1,)),
    *rows(RANGE, "enabled source_min source_max target_min target_max", prefix="grpo.reward_scaling", changes_meaning=True),
    *rows("advantages are not clipped", "advantage_clip_low advantage_clip_high", prefix="grpo", changes_meaning=True),
    *rows("sequences are not left out by their error", "seq_logprob_error_threshold", prefix="grpo", changes_meaning=True),
    *rows("no advantage is set by hand", "invalid_tool_call_advantage", prefix="grpo", changes_meaning=True),
    *rows("no advantage is set by hand", "malformed_thinking_advantage", prefix="grpo", changes_meaning=True),
    *rows(FAILURES, "async_grpo.max_generation_failures", prefix="grpo", neutral=(0,)),
    *rows(
        "the cache is always computed anew when weights change",
        "async_grpo.recompute_kv_cache_after_weight_updates",
        prefix="grpo",
    ),
    *rows(
        "reference log-probabilities are computed where a term needs them",
        "skip_reference_policy_logprobs_calculation",
        prefix="grpo",
    ),
    *rows(UNREAD, "best_at_k_k best_at_k_m combined_training_best_at_k_weight use_best_at_k", prefix="grpo"),
    *rows(UNREAD, "use_combined_training combined_training_pass_at_1_weight combined_training_weight_mode", prefix="grpo"),
    *rows(UNREAD, "num_val_generations_per_prompt dynamic_sampling_oversample_ratio", prefix="grpo"),
    *rows(UNREAD, "invalid_tool_call_strategy zero_variance_prompt_filtering penalize_invalid_tool_call", prefix="grpo"),
    *rows(UNREAD, "penalize_malformed_thinking", prefix="grpo"),
    *rows(
        PENALTY,
        """
        penalize_duplicated_reasoning penalize_empty_final_answer penalize_unwanted_tokens penalize_malformed_think_tag
        token_ids
        """,
        prefix="reward_penalties",
        changes_meaning=True,
    ),
    *rows(PENALTY, "unwanted think_open think_close", prefix="reward_penalties.token_ids", changes_meaning=True),
    *rows("no such term of the loss", "positive_example_nll_weight", prefix="loss_fn", changes_meaning=True, neutral=(0,)),
    *rows("a step's groups are trained on together", "min_groups_for_streaming_train", prefix="async_rl", changes_meaning=True),
    *rows("[async] bounds samples under way by async.max_staleness", "max_inflight_prompts", prefix="async_rl"),
    *rows("[async] bounds samples under way by async.max_staleness", "max_buffered_rollouts", prefix="async_rl"),
    *rows(
        "the cache is always computed anew when weights change", "recompute_kv_cache_after_weight_updates", prefix="async_rl"
    ),
    *rows(LOGS, "diagnostics", prefix="async_rl"),
    *rows(FAILURES, "backoff_base_s max_backoff_s max_consecutive_dropped_prompts", prefix="async_rl.rollout_failure"),
    *rows(FAILURES, "max_data_attempts_per_prompt max_infra_attempts_per_prompt", prefix="async_rl.rollout_failure"),
    *rows(FAILURES, "max_replacement_attempts max_skipped_prompts", prefix="async_rl.rollout_failure"),
    *rows(FAILURES, "min_step_batch_fraction on_dropped_prompt", prefix="async_rl.rollout_failure"),
    *rows(FAILURES, "replacement_reserve_prompts", prefix="async_rl.rollout_failure"),
    *rows(FAILURES, "rollout_failure.native.env_timeout_s rollout_failure.native.generation_timeout_s", prefix="async_rl"),
    *rows(FAILURES, "rollout_failure.nemo_gym.max_row_attempts", prefix="async_rl"),
    *rows(FAILURES, "rollout_failure.nemo_gym.rollout_timeout_s", prefix="async_rl"),
    *rows(FAILURES, "gym_subprocess_check interval_s stall_action stall_timeout_s", prefix="async_rl.stall_watchdog"),
    *rows(
        FAILURES,
        """
        enabled healthy_threshold max_restart_attempts_per_shard min_healthy_shards on_dead_shard probe_interval_s
        probe_timeout_s selection unhealthy_threshold
        """,
        prefix="async_rl.generation_fleet_health",
    ),
    *rows(SPEED, "enabled backend_timeout_s connect_timeout_s", prefix="async_rl.generation_router"),
    *rows(SPEED, "no_healthy_backend_status port_range_high port_range_low", prefix="async_rl.generation_router"),
    *rows(SPEED, "deduplicate_shared_teacher_checkpoints", prefix="on_policy_distillation"),
    *rows(
        "rewards play no part",
        "use_orm_advantage orm_advantage_weight",
        prefix="on_policy_distillation",
        changes_meaning=True,
        neutral=(False, 0),
    ),
    *rows(MOPD, "strict_agent_name_match default_teacher_alias non_colocated_teachers.*", prefix="on_policy_distillation"),
)
DROPPED: tuple[Dropped, ...] = (*_RUN, *_GRPO, *POLICY_ROWS, *GENERATION_ROWS, *DATA_ROWS, *ENVIRONMENT_ROWS)
"""Rows of all keys without a counterpart."""
