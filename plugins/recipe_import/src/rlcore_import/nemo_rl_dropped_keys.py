"""All of NeMo-RL's keys without a counterpart, each with the reason, at the commit in tests/recipe_import."""

from rlcore_import.nemo_rl_data_rows import DATA_ROWS, ENVIRONMENT_ROWS
from rlcore_import.nemo_rl_generation_rows import GENERATION_ROWS
from rlcore_import.nemo_rl_policy_rows import POLICY_ROWS
from rlcore_import.nemo_rl_reasons import DTENSOR, GEN, LOGS, MEGATRON, SPEED, UNREAD, WRITTEN
from rlcore_import.source import Dropped, differs, same

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
    *same("", "a value for references", "sif_dir"),
    *same("", SPEED, "data_plane on_policy_distillation"),
    *same("data_plane", SPEED, "enabled impl backend storage_capacity num_storage_units claim_meta_poll_interval_s"),
    *same("data_plane", SPEED, "global_segment_size local_buffer_size"),
    *same("cluster", SPEED, "master_port_range_low master_port_range_high segment_size"),
    *same("checkpointing", "the newest checkpoints are kept, not the best", "metric_name higher_is_better"),
    *same("checkpointing", WRITTEN, "model_save_format save_consolidated save_optimizer model_cache_dir"),
    *same("checkpointing", WRITTEN, "model_repo_id is_peft is_async"),
    *same("checkpointing", "checkpoint.every_n_steps alone decides when", "checkpoint_must_save_by ft_keep_latest_k"),
    *same("checkpointing", "checkpoint.every_n_steps alone decides when", "ft_save_period"),
    *differs("sft dpo rm", EPOCHS, "max_num_epochs"),
    *same("sft dpo rm", SPEED, "val_micro_batch_size"),
    *differs("sft", "all messages of the assistant are learned, not the final one alone", "only_unmask_final"),
    *same("logger", LOGS, "log_dir num_val_samples_to_print monitor_gpus wandb_enabled mlflow_enabled"),
    *same("logger", LOGS, "swanlab_enabled tensorboard wandb.* swanlab.* mlflow.* tensorboard.*"),
    *same("logger", LOGS, "gpu_monitoring.collection_interval gpu_monitoring.flush_interval"),
    *same("_teachers", "a value for references", "*"),
)
_GRPO = (
    *differs("grpo", EPOCHS, "max_num_epochs"),
    *same("grpo", SPEED, "val_batch_size calculate_advantages_on_gpu deduplicate_multimodal_data"),
    *same("grpo", SPEED, "debug_payload_metrics async_grpo"),
    *same("grpo", "evaluation begins with evaluation.every_n_steps", "val_start_at", -1),
    *differs("grpo", "a run has run.num_steps", "stop_at_validation_metric"),
    *differs("grpo", "a run has run.num_steps", "stop_at_validation_threshold"),
    *same("grpo", "groups are replaced one by one, as they are needed", "batch_multiplier", 1),
    *differs("grpo.reward_scaling", RANGE, "enabled source_min source_max target_min target_max"),
    *differs("grpo", "advantages are not clipped", "advantage_clip_low advantage_clip_high"),
    *differs("grpo", "sequences are not left out by their error", "seq_logprob_error_threshold"),
    *differs("grpo", "no advantage is set by hand", "invalid_tool_call_advantage"),
    *differs("grpo", "no advantage is set by hand", "malformed_thinking_advantage"),
    *same("grpo", FAILURES, "async_grpo.max_generation_failures", 0),
    *same(
        "grpo", "the cache is always computed anew when weights change", "async_grpo.recompute_kv_cache_after_weight_updates"
    ),
    *same(
        "grpo", "reference log-probabilities are computed where a term needs them", "skip_reference_policy_logprobs_calculation"
    ),
    *same("grpo", UNREAD, "best_at_k_k best_at_k_m combined_training_best_at_k_weight use_best_at_k"),
    *same("grpo", UNREAD, "use_combined_training combined_training_pass_at_1_weight combined_training_weight_mode"),
    *same("grpo", UNREAD, "num_val_generations_per_prompt dynamic_sampling_oversample_ratio"),
    *same("grpo", UNREAD, "invalid_tool_call_strategy zero_variance_prompt_filtering penalize_invalid_tool_call"),
    *same("grpo", UNREAD, "penalize_malformed_thinking"),
    *differs("reward_penalties", PENALTY, "penalize_duplicated_reasoning penalize_empty_final_answer penalize_unwanted_tokens"),
    *differs("reward_penalties", PENALTY, "penalize_malformed_think_tag token_ids"),
    *differs("reward_penalties.token_ids", PENALTY, "unwanted think_open think_close"),
    *differs("async_rl", "a step's groups are trained on together", "min_groups_for_streaming_train"),
    *same("async_rl", "[async] bounds samples under way by async.max_staleness", "max_inflight_prompts"),
    *same("async_rl", "[async] bounds samples under way by async.max_staleness", "max_buffered_rollouts"),
    *same("async_rl", "the cache is always computed anew when weights change", "recompute_kv_cache_after_weight_updates"),
    *same("async_rl", LOGS, "diagnostics"),
    *same("async_rl.rollout_failure", FAILURES, "backoff_base_s max_backoff_s max_consecutive_dropped_prompts"),
    *same("async_rl.rollout_failure", FAILURES, "max_data_attempts_per_prompt max_infra_attempts_per_prompt"),
    *same("async_rl.rollout_failure", FAILURES, "max_replacement_attempts max_skipped_prompts"),
    *same("async_rl.rollout_failure", FAILURES, "min_step_batch_fraction on_dropped_prompt"),
    *same("async_rl.rollout_failure", FAILURES, "replacement_reserve_prompts"),
    *same("async_rl", FAILURES, "rollout_failure.native.env_timeout_s rollout_failure.native.generation_timeout_s"),
    *same("async_rl", FAILURES, "rollout_failure.nemo_gym.max_row_attempts"),
    *same("async_rl", FAILURES, "rollout_failure.nemo_gym.rollout_timeout_s"),
    *same("async_rl.stall_watchdog", FAILURES, "gym_subprocess_check interval_s stall_action stall_timeout_s"),
    *same("async_rl.generation_fleet_health", FAILURES, "enabled healthy_threshold max_restart_attempts_per_shard"),
    *same("async_rl.generation_fleet_health", FAILURES, "min_healthy_shards on_dead_shard probe_interval_s probe_timeout_s"),
    *same("async_rl.generation_fleet_health", FAILURES, "selection unhealthy_threshold"),
    *same("async_rl.generation_router", SPEED, "enabled backend_timeout_s connect_timeout_s"),
    *same("async_rl.generation_router", SPEED, "no_healthy_backend_status port_range_high port_range_low"),
    *same("on_policy_distillation", SPEED, "deduplicate_shared_teacher_checkpoints"),
    *differs("on_policy_distillation", "rewards play no part", "use_orm_advantage orm_advantage_weight", False, 0),
    *same("on_policy_distillation", MOPD, "strict_agent_name_match default_teacher_alias non_colocated_teachers.*"),
)
DROPPED: tuple[Dropped, ...] = (*_RUN, *_GRPO, *POLICY_ROWS, *GENERATION_ROWS, *DATA_ROWS, *ENVIRONMENT_ROWS)
"""Rows of all keys without a counterpart."""
