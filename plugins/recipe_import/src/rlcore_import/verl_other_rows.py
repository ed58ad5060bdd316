"""verl's keys without a counterpart, each with the reason: data, algorithm, rewards, trainer, distillation, profilers."""

from rlcore_import.source import differs, same

SPEED = "speed or memory alone: what is trained is the same"
LOGS = "what is logged, kept or profiled alone"
CLASS = "a class of verl's"
REWARDS = "rewards are the environment's"
SKIPS = "skip.rollout skip.rollout_tq skip.async_rollout"
SANDBOXES = "reward.sandbox_fusion reward_model.sandbox_fusion sandbox_fusion"
FUNCTION = "environment.function.path, whose functions are given prompt, completion and row"
_ENGINE = (
    "name dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine data_parallel_size "
    "expert_parallel_size tensor_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs "
    "load_format engine_kwargs "
    "limit_images enable_chunked_prefill enable_prefix_caching disable_log_stats skip_tokenizer_init "
    "prompt_length response_length"
)

DISAGGREGATION = (
    "_target_ bootstrap_port decode_replicas decode_tensor_model_parallel_size enabled ib_device prefill_replicas "
    "transfer_backend"
)
_TEACHER = "_target_ key num_replicas inference._target_ inference.temperature"
_TEACHER += "".join(f" inference.{name}" for name in _ENGINE.split())
ALGORITHM_ROWS = (
    *same("algorithm", CLASS, "_target_ filter_groups._target_ kl_ctrl._target_"),
    *differs("algorithm", "a group is replaced where its rewards are equal, before penalties", "filter_groups.metric", "score"),
    *same("algorithm", "replacements are asked for as they are needed", "filter_groups.max_inflight_gen_batches"),
    *same("algorithm", "of a coefficient that adapts, where it is fixed", "kl_ctrl.horizon kl_ctrl.target_kl"),
    *differs("algorithm", "samples are not weighed again", "use_pf_ppo"),
    *same("algorithm", "of use_pf_ppo", "pf_ppo.reweight_method pf_ppo.weight_pow"),
    *differs("algorithm", "weights are not divided by their mean", "rollout_correction.rollout_is_batch_normalize"),
)
DATA_ROWS = (
    *same("data", SPEED, "use_shm val_batch_size dataloader_num_workers filter_overlong_prompts_workers trust_remote_code"),
    *differs("data", "prompts over the limit are an error, or left out", "truncation", "error"),
    *differs("data", "the tokenizer is the model's own", "tokenizer"),
    *differs(
        "data",
        "rows of the user's own code",
        "custom_cls.path custom_cls.name sampler.class_path sampler.class_name datagen.path datagen.name",
    ),
    *differs("data", "turns and tools are the environment's", "tool_config_path function_tool_path"),
    *differs("data", "an image is a part of its message", "image_key", "images"),
    *differs("data", "no video and no sound is read", "video_key", "videos"),
    *differs("data", "no video and no sound is read", "audio_key", "audios"),
    *differs("data", "the processor is the model's own", "mm_processor_kwargs mm_processor_kwargs.*"),
    *same("data", "patches are the model's own", "image_patch_size"),
    *same(
        "data",
        "what rows keep for verl's own code",
        "return_raw_input_ids return_raw_chat return_full_prompt return_multi_modal_inputs",
    ),
    *differs("data", REWARDS, "reward_fn_key", "data_source"),
    *same("data", "all held-out rows are measured", "validation_shuffle"),
)
TRAINER_ROWS = (
    *differs("trainer", "a run has run.num_steps; its data begin anew as often as these need", "total_epochs"),
    *same("trainer", LOGS, "logger log_val_generations rollout_data_dir validation_data_dir esi_redundant_time"),
    *same("trainer", LOGS, "default_hdfs_dir default_local_dir del_local_ckpt_after_load max_critic_ckpt_to_keep"),
    *same("trainer", SPEED, "balance_batch ray_wait_register_center_timeout device use_v1 use_legacy_worker_impl v1.sync"),
    *same("trainer", SPEED, "v1.colocate_async.num_warmup_batches v1.separate_async.num_warmup_batches"),
    *differs("trainer", "rlcore train --resume goes on with a run", "resume_mode", "auto", "disable"),
    *differs("trainer", "rlcore train --resume goes on with a run", "resume_from_path"),
    *differs("trainer", "async.max_staleness", "v1.trainer_mode", "sync"),
    *same("trainer", "of a trainer_mode that is not sync", "v1.separate_async.parameter_sync_step"),
    *same(
        "trainer.v1.separate_async.hybrid_rollout",
        "of a trainer_mode that is not sync",
        "enable_switch switch_threshold_ratio adaptive_switch_threshold switch_threshold_step_up switch_threshold_step_down "
        "switch_threshold_release_steps switch_cost_window_size _target_",
    ),
    *differs("trainer.v1.sampler", "async.max_staleness", "max_off_policy_threshold", 8),
    *differs("trainer.v1.sampler", "async.on_stale", "max_off_policy_strategy", "drop"),
    *differs("trainer.v1.sampler", "rollout.on_environment_error", "sync_refill_failed_groups"),
    *differs(
        "trainer.v1.sampler", "prompts are drawn by [data.train]", "custom_sampler.path custom_sampler.name sampler_kwargs"
    ),
)
REWARD_ROWS = (
    *same("reward", CLASS, "_target_ reward_manager._target_ reward_manager.module._target_"),
    *same("reward", CLASS, "reward_model._target_ reward_model.rollout._target_ sandbox_fusion._target_"),
    *same("", CLASS, "reward_manager._target_ reward_manager.module._target_ reward_model.rollout._target_"),
    *same("", SPEED, "reward.num_workers reward_model.num_workers"),
    *differs("custom_reward_function reward.custom_reward_function", FUNCTION, "path reward_kwargs.*"),
    *differs("custom_reward_function reward.custom_reward_function", FUNCTION, "name", "compute_score"),
    *differs("", REWARDS, "reward.reward_manager.source reward_manager.source reward_model.reward_loop_source", "register"),
    *differs("", REWARDS, "reward.reward_manager.module.path reward_manager.module.path reward_model.reward_loop_module_path"),
    *differs("", REWARDS, "reward_model.reward_loop_class_name"),
    *same("", LOGS, "reward.reward_manager.module.name reward_manager.module.name"),
    *same("", LOGS, "reward.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.overlong_buffer_cfg.log"),
    *differs(SANDBOXES, "programs run in the environment code", "url"),
    *same(SANDBOXES, "of the service for programs", "max_concurrent memory_limit_mb"),
    *same("reward.reward_model", SPEED, "enable_resource_pool n_gpus_per_node nnodes"),
    *same(
        "reward.reward_model.rollout",
        SPEED,
        f"{_ENGINE} pipeline_model_parallel_size layered_summon scheduling_policy full_determinism seed multi_stage_wake_up",
    ),
    *same(
        "reward.reward_model.rollout",
        "a reward model scores, and samples nothing",
        "ignore_eos temperature top_k top_p do_sample n quantization quantization_config_file mtp",
    ),
    *same("reward.reward_model.rollout.disaggregation", SPEED, DISAGGREGATION),
    *same("reward_model", SPEED, "enable_resource_pool n_gpus_per_node nnodes strategy micro_batch_size"),
    *same("reward_model", SPEED, "micro_batch_size_per_gpu use_dynamic_bsz forward_max_token_len_per_gpu"),
    *same("reward_model", SPEED, "launch_reward_fn_async ulysses_sequence_parallel_size use_reward_loop nccl_timeout"),
    *same("reward_model", SPEED, "load_weight model.use_shm model.use_remove_padding model.use_fused_kernels"),
    *same("reward_model", SPEED, "model.trust_remote_code model.fsdp_config._target_"),
    *same("reward_model", SPEED, "model.fsdp_config.wrap_policy.min_num_params model.fsdp_config.param_offload"),
    *same("reward_model", SPEED, "model.fsdp_config.reshard_after_forward model.fsdp_config.fsdp_size"),
    *same("reward_model", SPEED, "model.fsdp_config.forward_prefetch"),
    *same("reward_model.rollout", SPEED, _ENGINE),
    *same(
        "reward_model.megatron",
        "where the reward model computes",
        "_target_ context_parallel_size dtype expert_model_parallel_size expert_tensor_parallel_size "
        "override_transformer_config param_offload pipeline_model_parallel_size seed sequence_parallel "
        "tensor_model_parallel_size use_distributed_optimizer use_mbridge use_remove_padding vanilla_mbridge "
        "virtual_pipeline_model_parallel_size",
    ),
    *same("", "where the reward model computes", "reward_model.megatron.override_transformer_config.*"),
    *differs(
        "reward_model.megatron",
        "environment.reward_model.path has the weights",
        "dist_checkpointing_path dist_checkpointing_prefix use_dist_checkpointing",
    ),
    *differs(
        "reward_model",
        "the reward model's own length, tokenizer and configuration count",
        "max_length model.input_tokenizer model.override_config model.external_lib",
    ),
)
DISTILLATION_ROWS = (
    *same("distillation", CLASS, "_target_ distillation_loss._target_"),
    *same("distillation", SPEED, "n_gpus_per_node nnodes"),
    *same("distillation.teacher_models.teacher_model", "where the teacher computes", _TEACHER),
    *same("distillation", "of several teachers", "teacher_key"),
    *same("distillation.distillation_loss", "of other losses of distillation", "topk policy_loss_mode"),
    *same(
        "distillation.distillation_loss", "ratios are cut at importance_maximum", "clip_ratio clip_ratio_low clip_ratio_high"
    ),
    *differs("distillation.distillation_loss", "the loss has no other term", "distillation_loss_coef", 1),
    *differs("distillation.distillation_loss", "a token's divergence is within ±20", "loss_max_clamp log_prob_min_clamp"),
)
OTHER_ROWS = (
    *same("", SPEED, "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout"),
    *same("", "which files are composed, whose keys are read", "model_engine"),
    *differs(SKIPS, "earlier samples are not read in place of new ones", "enable"),
    *same(SKIPS, "of samples that are read again", "dump_dir steps action"),
    *same("", CLASS, "skip._target_"),
    *same("", "an argument of ray.init", "ray_kwargs.ray_init.* ray_init.*"),
    *same("", LOGS, "ray_kwargs.timeline_json_file"),
    *same("transfer_queue", SPEED, "enable backend.storage_backend backend.MooncakeStore.auto_init"),
    *same("transfer_queue", SPEED, "backend.MooncakeStore.device_name backend.MooncakeStore.global_segment_size"),
    *same("transfer_queue", SPEED, "backend.MooncakeStore.local_buffer_size backend.MooncakeStore.local_hostname"),
    *same("transfer_queue", SPEED, "backend.MooncakeStore.master_server_address backend.MooncakeStore.metadata_server"),
    *same("transfer_queue", SPEED, "backend.MooncakeStore.protocol backend.SimpleStorage.num_data_storage_units"),
    *same("transfer_queue", SPEED, "backend.SimpleStorage.total_storage_size metrics.enabled metrics.port"),
    *same("", LOGS, "global_profiler.*"),
    *same("actor_rollout_ref.actor actor_rollout_ref.ref actor_rollout_ref.rollout critic reward_model", LOGS, "profiler.*"),
)
