"""NeMo-RL's keys without a counterpart, each with the reason, as they stand at the commit of tests/recipe_import."""

from rlcore_import.source import Dropped, rows

SPEED = "speed or memory alone"
ROUNDINGS = "another kernel: equal but for roundings"
LOGS = "what is logged alone"
UNREAD = "NeMo-RL reads no such key"
ENGINE = "an option of another engine: samples come from vLLM"
VIDEO = "rows have no videos"
QUANTISED = "weights are not quantised while they train"
MOPD = "[reference] is one teacher, in the policy's layout"
FAILURES = "what follows on failures alone: see rollout.on_environment_error and cluster.max_engine_restarts"
EPOCHS = "a run has run.num_steps; its data begin anew as often as these need"
PENALTY = "no such penalty of rewards"
CONFIG = "the model's config.json counts as it is"
ENVIRONMENT = "set it where the run is started"
ALL_QUANTISED = "all linear layers are quantised"
WRITTEN = "how checkpoints are written alone"
FURTHER = "layers that predict further tokens are left out; see trainer.megatron.mtp"
RANGE = "rewards are not mapped to another range"
TOWER = "the tower trains"
ALL_ROWS = "all rows are taken"
GEN, MEGATRON, DTENSOR = "policy.generation", "policy.megatron_cfg", "policy.dtensor_cfg"
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
"""Tables of logs, tables that NeMo-RL passes on, and tables of engines: each of their keys is told where they are read."""
_RUN = (
    *rows("a value for references", "sif_dir"),
    *rows(SPEED, "data_plane on_policy_distillation"),
    *rows(SPEED, "enabled impl backend storage_capacity num_storage_units claim_meta_poll_interval_s", prefix="data_plane"),
    *rows(SPEED, "global_segment_size local_buffer_size", prefix="data_plane"),
    *rows(SPEED, "master_port_range_low master_port_range_high segment_size", prefix="cluster"),
    *rows("the newest checkpoints are kept, not the best", "metric_name higher_is_better", prefix="checkpointing"),
    *rows(WRITTEN, "model_save_format save_consolidated save_optimizer model_cache_dir", prefix="checkpointing"),
    *rows(WRITTEN, "model_repo_id is_peft is_async", prefix="checkpointing"),
    *rows("checkpoint.every_n_steps alone says when", "checkpoint_must_save_by ft_keep_latest_k", prefix="checkpointing"),
    *rows("checkpoint.every_n_steps alone says when", "ft_save_period", prefix="checkpointing"),
    *rows(EPOCHS, "max_num_epochs", prefix="sft", changes_meaning=True),
    *rows(EPOCHS, "max_num_epochs", prefix="dpo", changes_meaning=True),
    *rows(EPOCHS, "max_num_epochs", prefix="rm", changes_meaning=True),
    *rows(SPEED, "val_micro_batch_size", prefix="sft"),
    *rows(SPEED, "val_micro_batch_size", prefix="dpo"),
    *rows(SPEED, "val_micro_batch_size", prefix="rm"),
    *rows(
        "the final message alone is not told apart: all of the assistant's are learned",
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
_POLICY = (
    *rows(SPEED, "generation_batch_size logprob_batch_size logprob_chunk_size", prefix="policy"),
    *rows(SPEED, "offload_optimizer_for_logprob make_sequence_length_divisible_by refit_buffer_size_gb", prefix="policy"),
    *rows(SPEED, "tokenizer.use_fastokens dynamic_batching.logprob_mb_tokens", prefix="policy"),
    *rows(SPEED, "dynamic_batching.sequence_length_round optimizer.kwargs.foreach optimizer.kwargs.fused", prefix="policy"),
    *rows(SPEED, "algorithm fuse_loss logprob_mb_tokens microbatch_order", prefix="policy.sequence_packing"),
    *rows(SPEED, "sequence_length_round", prefix="policy.sequence_packing"),
    *rows(UNREAD, "activation_checkpointing_enabled", prefix="policy"),
    *rows("the trainer's own", "optimizer", prefix="policy"),
    *rows("weights in fewer bits are converted as they are loaded", "dequantize_base_checkpoint", prefix="policy"),
    *rows("the model's config.json says so", "is_vlm", prefix="policy"),
    *rows(VIDEO, "tokenizer.video.num_frames", prefix="policy", changes_meaning=True),
    *rows(QUANTISED, "quant_cfg quant_calib_data quant_calib_size quant_batch_size", prefix="policy", changes_meaning=True),
    *rows(QUANTISED, "quant_sequence_length disable_modelopt_layer_spec", prefix="policy", changes_meaning=True),
    *rows(
        "no auxiliary loss is on",
        "hf_config_overrides.router_aux_loss_coef hf_config_overrides.text_config.router_aux_loss_coef",
        prefix="policy",
        changes_meaning=True,
        neutral=(0,),
    ),
    *rows("no drafter is trained", "enabled loss_weight model_name", prefix="policy.draft", changes_meaning=True),
    *rows("no drafter is trained", "num_layers aux_layer_indices", prefix="policy.draft", changes_meaning=True),
    *rows(
        "moments are float32",
        "optimizer.kwargs.exp_avg_dtype optimizer.kwargs.exp_avg_sq_dtype",
        prefix="policy",
        changes_meaning=True,
        neutral=("torch.float32",),
    ),
    *rows(
        "masters are float32",
        "optimizer.kwargs.master_weights optimizer.kwargs.store_param_remainders",
        prefix="policy",
        changes_meaning=True,
        neutral=(True,),
    ),
    *rows(CONFIG, "hf_config_overrides hf_config_overrides.*", prefix="policy", changes_meaning=True),
)
_DTENSOR = (
    *rows("the only implementation", "_v2", prefix=DTENSOR, neutral=(True,)),
    *rows(SPEED, "custom_parallel_plan defer_fsdp_grad_sync clear_cache_every_n_steps env_vars", prefix=DTENSOR),
    *rows(SPEED, "automodel_kwargs env_vars.PYTORCH_CUDA_ALLOC_CONF", prefix=DTENSOR),
    *rows(SPEED, "automodel_kwargs.backend.enable_fsdp_optimizations", prefix=DTENSOR),
    *rows(SPEED, "automodel_kwargs.backend.enable_hf_state_dict_adapter lora_cfg.use_triton", prefix=DTENSOR),
    *rows(SPEED, "ignore_router_for_ac reshard_after_forward wrap_outer_model", prefix=f"{DTENSOR}.moe_parallelizer"),
    *rows(ROUNDINGS, "moe_parallelizer.lm_head_precision", prefix=DTENSOR),
    *rows(ROUNDINGS, "attn_implementation force_hf use_liger_kernel", prefix=f"{DTENSOR}.automodel_kwargs"),
    *rows(ROUNDINGS, "use_sdpa_patching", prefix=f"{DTENSOR}.automodel_kwargs"),
    *rows(ROUNDINGS, "_target_ attn linear rms_norm experts dispatcher", prefix=f"{DTENSOR}.automodel_kwargs.backend"),
    *rows(ROUNDINGS, "enable_deepep gate_precision rope_fusion", prefix=f"{DTENSOR}.automodel_kwargs.backend"),
    *rows(
        "routers choose by their weights", "automodel_kwargs.backend.fake_balanced_gate", prefix=DTENSOR, changes_meaning=True
    ),
    *rows(TOWER, "automodel_kwargs.freeze_config.freeze_audio_tower", prefix=DTENSOR, changes_meaning=True),
    *rows(
        "the language model trains",
        "automodel_kwargs.freeze_config.freeze_language_model",
        prefix=DTENSOR,
        changes_meaning=True,
    ),
    *rows("lora.targets names what has adapters", "lora_cfg.exclude_modules", prefix=DTENSOR, changes_meaning=True),
    *rows(ENVIRONMENT, "env_vars.*", prefix=DTENSOR, changes_meaning=True),
)
_MEGATRON = (
    *rows(UNREAD, "_override_ calculate_per_token_loss cp_normalize do_not_average_loss", prefix=MEGATRON),
    *rows(UNREAD, "scale_loss_by_dp_cp_size converter_type first_last_layers_bf16", prefix=MEGATRON),
    *rows(UNREAD, "num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 track_moe_metrics train_iters", prefix=MEGATRON),
    *rows("lora.targets names what has adapters", "peft.exclude_modules", prefix=MEGATRON, changes_meaning=True),
    *rows(WRITTEN, "checkpoint.async_save checkpoint.ckpt_assume_constant_structure", prefix=MEGATRON),
    *rows(SPEED, "fully_parallel_load_exchange_algo fully_parallel_load_process_group", prefix=f"{MEGATRON}.checkpoint"),
    *rows(SPEED, "fully_parallel_save_process_group", prefix=f"{MEGATRON}.checkpoint"),
    *rows(SPEED, "use_fused_linear_logprobs fused_linear_logprobs_chunk_size force_reconvert_from_hf", prefix=MEGATRON),
    *rows(SPEED, "empty_unused_memory_level cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps", prefix=MEGATRON),
    *rows(SPEED, "fine_grained_activation_offloading offload_modules clear_memory_caches_before_refit", prefix=MEGATRON),
    *rows(SPEED, "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage", prefix=MEGATRON),
    *rows(SPEED, "moe_per_layer_logging moe_enable_deepep moe_token_dispatcher_type", prefix=MEGATRON),
    *rows(SPEED, "moe_shared_expert_overlap moe_flex_dispatcher_backend moe_hybridep_num_sms", prefix=MEGATRON),
    *rows(SPEED, "hybridep_num_ranks_per_nvlink_domain hybridep_use_mnnvl use_gloo_process_groups", prefix=MEGATRON),
    *rows(SPEED, "env_vars env_vars.PYTORCH_CUDA_ALLOC_CONF fp8_cfg.force_clear_fp8_caches", prefix=MEGATRON),
    *rows(SPEED, "peft.a2a_experimental", prefix=MEGATRON),
    *rows(SPEED, "use_distributed_optimizer use_precision_aware_optimizer", prefix=f"{MEGATRON}.optimizer"),
    *rows(SPEED, "optimizer_cpu_offload optimizer_offload_fraction", prefix=f"{MEGATRON}.optimizer"),
    *rows(SPEED, "overlap_cpu_optimizer_d2h_h2d", prefix=f"{MEGATRON}.optimizer"),
    *rows(
        SPEED,
        """
        overlap_grad_reduce overlap_param_gather use_custom_fsdp data_parallel_sharding_strategy average_in_collective
        """,
        prefix=f"{MEGATRON}.distributed_data_parallel_config",
    ),
    *rows(ROUNDINGS, "moe_permute_fusion apply_rope_fusion bias_activation_fusion defer_fp32_logits", prefix=MEGATRON),
    *rows(ROUNDINGS, "gradient_accumulation_fusion use_fused_weighted_squared_relu attention_backend", prefix=MEGATRON),
    *rows(ROUNDINGS, "moe_grouped_gemm transformer_impl pipeline_dtype", prefix=MEGATRON),
    *rows("routers train with the rest", "freeze_moe_router", prefix=MEGATRON, changes_meaning=True),
    *rows("trainer.fsdp2.freeze alone freezes a tower", "freeze_vision_model", prefix=MEGATRON, changes_meaning=True),
    *rows("trainer.fsdp2.freeze alone freezes a tower", "freeze_vision_projection", prefix=MEGATRON, changes_meaning=True),
    *rows("the tower's positions are the model's own", "radio_force_cpe_eval_mode", prefix=MEGATRON, changes_meaning=True),
    *rows(
        "routers' biases stay as they are", "moe_router_bias_update_rate", prefix=MEGATRON, changes_meaning=True, neutral=(0,)
    ),
    *rows("the model's config.json says so", "moe_router_enable_expert_bias", prefix=MEGATRON),
    *rows(
        "no auxiliary loss is on; trainer.megatron.transformer.moe_aux_loss_coeff turns one on",
        "moe_router_load_balancing_type",
        prefix=MEGATRON,
        changes_meaning=True,
        neutral=("none",),
    ),
    *rows("no auxiliary loss is on", "moe_aux_loss_coeff", prefix=MEGATRON, changes_meaning=True, neutral=(0,)),
    *rows(FURTHER, "mtp_num_layers mtp_loss_scaling_factor", prefix=MEGATRON, changes_meaning=True, neutral=(0, False)),
    *rows(FURTHER, "mtp_use_repeated_layer mtp_detach_heads", prefix=MEGATRON, changes_meaning=True, neutral=(0, False)),
    *rows("float16 is not trained in", "optimizer.fp16", prefix=MEGATRON, changes_meaning=True),
    *rows("model.dtype says so", "optimizer.bf16", prefix=MEGATRON, changes_meaning=True, neutral=(True,)),
    *rows("masters are float32", "optimizer.params_dtype", prefix=MEGATRON, changes_meaning=True, neutral=("float32",)),
    *rows("AdamW has no such option", "optimizer.sgd_momentum", prefix=MEGATRON),
    *rows(
        "weight decay is constant",
        "scheduler.weight_decay_incr_style",
        prefix=MEGATRON,
        changes_meaning=True,
        neutral=("constant",),
    ),
    *rows("what a resumed run reads alone", "scheduler.override_opt_param_scheduler", prefix=MEGATRON),
    *rows("the format is e4m3", "fp8_cfg.fp8", prefix=MEGATRON, changes_meaning=True, neutral=("e4m3",)),
    *rows("weights stay in model.dtype", "fp8_cfg.fp8_param", prefix=MEGATRON, changes_meaning=True),
    *rows("adapters begin at 0", "peft.lora_B_init_method", prefix=MEGATRON, changes_meaning=True, neutral=("zero",)),
    *rows("adapters are float32", "peft.lora_dtype", prefix=MEGATRON, changes_meaning=True, neutral=("None", "float32")),
    *rows(TOWER, "freeze_sound_encoder freeze_sound_projection freeze_config.*", prefix=MEGATRON, changes_meaning=True),
    *rows(CONFIG, "model_overrides model_overrides.*", prefix=MEGATRON, changes_meaning=True),
    *rows(ENVIRONMENT, "env_vars.*", prefix=MEGATRON, changes_meaning=True),
)
_GENERATION = (
    *rows(SPEED, "port_range_low port_range_high refit_transport use_async_rollouts", prefix=GEN),
    *rows(SPEED, "real_quant_export_cpu_offload vllm_kwargs refit_cfg.sparse.baseline.in_memory", prefix=GEN),
    *rows(SPEED, "refit_cfg.sparse.delta_compression.encoding refit_cfg.sparse.verify_samples_per_payload", prefix=GEN),
    *rows(SPEED, "vllm_cfg.limit_mm_per_prompt.audio vllm_cfg.limit_mm_per_prompt.video", prefix=GEN),
    *rows(SPEED, "vllm_kwargs.limit_mm_per_prompt.audio vllm_kwargs.limit_mm_per_prompt.image", prefix=GEN),
    *rows(SPEED, "vllm_kwargs.limit_mm_per_prompt.video.count", prefix=GEN),
    *rows(SPEED, "vllm_kwargs.kernel_config.enable_flashinfer_autotune", prefix=GEN),
    *rows(SPEED, "update_weights_bucket_memory_ratio device backend_name", prefix=f"{GEN}.refit_cfg.nixl"),
    *rows(SPEED, "backend_init_params release_after_refit shard_expert_weights", prefix=f"{GEN}.refit_cfg.nixl"),
    *rows(SPEED, "async_engine pipeline_parallel_size expert_parallel_size", prefix=f"{GEN}.vllm_cfg"),
    *rows(SPEED, "enable_expert_parallel expose_http_server skip_tokenizer_init load_format", prefix=f"{GEN}.vllm_cfg"),
    *rows(SPEED, "env_vars reset_encoder_cache_after_weight_update http_refit_api_key_env_var", prefix=f"{GEN}.vllm_cfg"),
    *rows(SPEED, "http_refit_server_port zmq_refit_server_port cap_max_tokens_to_context", prefix=f"{GEN}.vllm_cfg"),
    *rows(SPEED, "block_size disable_custom_all_reduce enable_chunked_prefill", prefix=f"{GEN}.vllm_kwargs"),
    *rows(SPEED, "mm_processor_cache_gb kv_cache_memory_bytes skip_mm_profiling", prefix=f"{GEN}.vllm_kwargs"),
    *rows(SPEED, "mamba_cache_mode allowed_local_media_path", prefix=f"{GEN}.vllm_kwargs"),
    *rows(SPEED, "backend cudagraph_capture_sizes cudagraph_mode", prefix=f"{GEN}.vllm_kwargs.compilation_config"),
    *rows("no token is forbidden", "bad_words", prefix=GEN, changes_meaning=True),
    *rows("an answer ends with its end token", "ignore_eos", prefix=GEN, changes_meaning=True),
    *rows("generator.vllm.quantization knows fp8 alone", "quant_cfg real_quant", prefix=GEN, changes_meaning=True),
    *rows("generator.vllm.quantization knows fp8 alone", "real_quant_ignore", prefix=GEN, changes_meaning=True),
    *rows(LOGS, "use_tqdm enable_vllm_metrics_logger vllm_metrics_logger_interval", prefix=f"{GEN}.vllm_cfg"),
    *rows(UNREAD, "enable_thinking enforce_monotonicity max_num_seqs", prefix=f"{GEN}.vllm_cfg"),
    *rows(ROUNDINGS, "vllm_cfg.use_deep_gemm vllm_kwargs.compilation_config.custom_ops", prefix=GEN),
    *rows(ROUNDINGS, "vllm_kwargs.compilation_config.pass_config.fuse_allreduce_rms", prefix=GEN),
    *rows(ROUNDINGS, "vllm_kwargs.attention_config.use_trtllm_attention vllm_kwargs.kernel_config.moe_backend", prefix=GEN),
    *rows(ROUNDINGS, "attention_backend moe_backend mamba_ssm_cache_dtype", prefix=f"{GEN}.vllm_kwargs"),
    *rows(VIDEO, "num_frames sampling_style temporal_patch_size", prefix=f"{GEN}.vllm_cfg.video", changes_meaning=True),
    *rows(VIDEO, "vllm_kwargs.limit_mm_per_prompt.video.num_frames", prefix=GEN, changes_meaning=True),
    *rows("blocks of 128 x 128 share a scale", "vllm_cfg.is_mx", prefix=GEN, changes_meaning=True),
    *rows(ALL_QUANTISED, "vllm_cfg.quantization_ignored_layer_kws", prefix=GEN, changes_meaning=True),
    *rows(ALL_QUANTISED, "vllm_cfg.num_last_layers_in_bf16", prefix=GEN, changes_meaning=True, neutral=(0,)),
    *rows(ALL_QUANTISED, "vllm_cfg.num_first_layers_in_bf16", prefix=GEN, changes_meaning=True, neutral=(0,)),
    *rows(
        "log-probabilities are those of the distribution sampled from",
        "vllm_cfg.logprobs_mode",
        prefix=GEN,
        changes_meaning=True,
        neutral=("processed_logprobs",),
    ),
    *rows(
        "rollout.tool_parser reads calls; thoughts stay in answers",
        "vllm_cfg.reasoning_parser_plugin",
        prefix=GEN,
        changes_meaning=True,
    ),
    *rows("images are read where rows have them", "vllm_kwargs.language_model_only", prefix=GEN),
    *rows(
        "drafts leave the distribution as it is: generator.vllm.speculative_model",
        "method model num_speculative_tokens draft_tensor_parallel_size",
        prefix=f"{GEN}.vllm_kwargs.speculative_config",
    ),
    *rows("the tokenizer is the model's own", "vllm_kwargs.tokenizer", prefix=GEN, changes_meaning=True),
    *rows(ENGINE, "mcore_generation_config.* sglang_cfg.* trtllm_cfg.* trtllm_kwargs.*", prefix=GEN, changes_meaning=True),
    *rows(ENGINE, "dynamo_cfg.*", prefix=GEN, changes_meaning=True),
    *rows(ENVIRONMENT, "vllm_cfg.env_vars.*", prefix=GEN, changes_meaning=True),
    *rows(
        "the server for agents takes model.chat_template and its variables; thoughts stay in answers",
        "vllm_cfg.http_server_serving_chat_kwargs vllm_cfg.http_server_serving_chat_kwargs.*",
        prefix=GEN,
        changes_meaning=True,
    ),
)
_DATA = (
    *rows("no such data set", "train validation default", prefix="data"),
    *rows(SPEED, "num_workers train.download_dir train.use_preserving_dataset validation.download_dir", prefix="data"),
    *rows(SPEED, "validation.use_preserving_dataset default.download_dir default.use_preserving_dataset", prefix="data"),
    *rows("rows come from all sets as they are merged", "use_multiple_dataloader", prefix="data", changes_meaning=True),
    *rows("rows come from all sets as they are merged", "num_prompts_per_dataloader", prefix="data", changes_meaning=True),
    *rows("rows are taken in their order, or shuffled", "custom_dataloader", prefix="data", changes_meaning=True),
    *rows(
        "what is learned begins behind the template's beginning of an answer",
        "add_generation_prompt",
        prefix="data",
        changes_meaning=True,
        neutral=(True,),
    ),
    *rows("the tokenizer and its template say so", "add_bos", prefix="data", changes_meaning=True, neutral=(True,)),
    *rows(
        "an answer that is learned ends with the tokenizer's end",
        "add_eos",
        prefix="data",
        changes_meaning=True,
        neutral=(True,),
    ),
    *rows(UNREAD, "add_system_prompt dataset_name prompt_file", prefix="data"),
    *rows("of the held-out share alone", "train.seed validation.seed default.seed", prefix="data"),
    *rows("data.*.limit takes the first rows", "train.max_samples", prefix="data", changes_meaning=True),
    *rows("data.*.limit takes the first rows", "validation.max_samples", prefix="data", changes_meaning=True),
    *rows("data.*.limit takes the first rows", "default.max_samples", prefix="data", changes_meaning=True),
    *rows("each row comes once an epoch", "train.repeat", prefix="data", changes_meaning=True, neutral=(1,)),
    *rows(ALL_ROWS, "allowed_problem_types verifiable_only require_valid", prefix="data.train", changes_meaning=True),
    *rows(ALL_ROWS, "allowed_problem_types verifiable_only require_valid", prefix="data.validation", changes_meaning=True),
    *rows(ALL_ROWS, "allowed_problem_types verifiable_only require_valid", prefix="data.default", changes_meaning=True),
    *rows(
        "a message of the row",
        """
        train.system_key train.system_prompt validation.system_key validation.system_prompt default.system_key
        default.system_prompt
        """,
        prefix="data",
        changes_meaning=True,
    ),
    *rows(
        "the field tools of a row",
        "train.tool_key validation.tool_key default.tool_key",
        prefix="data",
        changes_meaning=True,
        neutral=("tools",),
    ),
    *rows(
        "answers are taken as they are",
        "train.extract_answer validation.extract_answer default.extract_answer",
        prefix="data",
        changes_meaning=True,
        neutral=(True,),
    ),
    *rows(
        "answers get what rollout.max_response_tokens leaves",
        "train.min_generation_tokens validation.min_generation_tokens default.min_generation_tokens",
        prefix="data",
        changes_meaning=True,
    ),
    *rows(VIDEO, "num_frames video_sampling_style video_target_num_patches", prefix="data.train", changes_meaning=True),
    *rows(VIDEO, "video_temporal_patch_size video_maintain_aspect_ratio", prefix="data.train", changes_meaning=True),
    *rows(
        VIDEO,
        """
        num_frames video_sampling_style video_target_num_patches video_temporal_patch_size video_maintain_aspect_ratio
        """,
        prefix="data.validation",
        changes_meaning=True,
    ),
    *rows(VIDEO, "num_frames video_sampling_style video_target_num_patches", prefix="data.default", changes_meaning=True),
    *rows(VIDEO, "video_temporal_patch_size video_maintain_aspect_ratio", prefix="data.default", changes_meaning=True),
    *rows("each row comes once an epoch", "validation.repeat default.repeat", prefix="data", neutral=(1,)),
)
_ENVIRONMENTS = (
    *rows(SPEED, "math.num_workers dapo.num_workers math_multi_reward.num_workers clevr-cogent.num_workers", prefix="env"),
    *rows(SPEED, "geometry3k.num_workers mmpr-tiny.num_workers refcoco.num_workers vlm.num_workers", prefix="env"),
    *rows(SPEED, "reward_model.resources.gpus_per_node reward_model.resources.num_nodes", prefix="env"),
    *rows(SPEED, "reward_model.dynamic_batching.enabled reward_model.sequence_packing.enabled", prefix="env"),
    *rows(SPEED, "max_model_len offload_optimizer_for_logprob processor max_grad_norm", prefix="env.reward_model"),
    *rows(SPEED, "logprob_batch_size", prefix="env.reward_model"),
    *rows(SPEED, "_v2 activation_checkpointing context_parallel_size cpu_offload", prefix="env.reward_model.dtensor_cfg"),
    *rows(SPEED, "custom_parallel_plan enabled sequence_parallel", prefix="env.reward_model.dtensor_cfg"),
    *rows(SPEED, "tensor_parallel_size", prefix="env.reward_model.dtensor_cfg"),
    *rows(
        'rewards of a function: environment.name = "function"',
        """
        clevr-cogent.reward_functions geometry3k.reward_functions mmpr-tiny.reward_functions refcoco.reward_functions
        vlm.reward_functions
        """,
        prefix="env",
        changes_meaning=True,
    ),
    *rows(
        "answers are compared by their text", "math_multi_reward.math_verify_impl", prefix="env", neutral=("hf_math_verify",)
    ),
    *rows(LOGS, "should_log_nemo_gym_responses", prefix="env"),
    *rows("the data name the environment", "should_use_nemo_gym", prefix="env"),
    *rows("a sample that its agent flags is trained on", "should_mask_flagged_samples", prefix="env", changes_meaning=True),
    *rows(
        "a reward model has one label",
        "reward_model.reward_model_cfg.enabled reward_model.reward_model_cfg.reward_model_type",
        prefix="env",
        neutral=(True, "bradley_terry"),
    ),
    *rows("environment.reward_model.path has the weights", "reward_model.checkpoint_path", prefix="env", changes_meaning=True),
    *rows("turns and rewards of a game that is not here", "sliding_puzzle_game.*", prefix="env", changes_meaning=True),
)
DROPPED: tuple[Dropped, ...] = (
    *_RUN,
    *_GRPO,
    *_POLICY,
    *_DTENSOR,
    *_MEGATRON,
    *_GENERATION,
    *_DATA,
    *_ENVIRONMENTS,
)
"""Keys without a counterpart; the first row counts."""
