"""verl's keys without a counterpart, each with the reason: data, algorithm, rewards, trainer, distillation, profilers."""

from collections.abc import Mapping

from rlcore_import.source import rows

SPEED = "speed or memory alone: what is trained is the same"
LOGS = "what is logged, kept or profiled alone"
CLASS = "a class of verl's"
REWARDS = "rewards are the environment's"
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
_PROFILER = "_target_ finish_hook_all_ranks finish_hook_cmd finish_hook_ranks relocate_results save_path tool"
_TOOLS: Mapping[str, str] = {
    "npu": "_target_ analysis contents discrete level profile_token_end profile_token_start",
    "nsys": "_target_ discrete",
    "precision_debugger": "_target_ config_path stages steps strict",
    "torch": "_target_ contents discrete profile_token_end profile_token_start schedule._target_ schedule.active "
    "schedule.repeat schedule.skip_first schedule.wait schedule.warmup",
    "torch_memory": "_target_ stack_depth trace_alloc_max_entries",
}

ALGORITHM_ROWS = (
    *rows(CLASS, "_target_ filter_groups._target_ kl_ctrl._target_", prefix="algorithm"),
    *rows(
        "a group is replaced where its rewards are equal, before penalties",
        "filter_groups.metric",
        prefix="algorithm",
        changes_meaning=True,
        neutral=("score",),
    ),
    *rows("replacements are asked for as they are needed", "filter_groups.max_inflight_gen_batches", prefix="algorithm"),
    *rows("of a coefficient that adapts, where it is fixed", "kl_ctrl.horizon kl_ctrl.target_kl", prefix="algorithm"),
    *rows("samples are not weighed again", "use_pf_ppo", prefix="algorithm", changes_meaning=True),
    *rows("of use_pf_ppo", "pf_ppo.reweight_method pf_ppo.weight_pow", prefix="algorithm"),
    *rows(
        "weights are not divided by their mean",
        "rollout_correction.rollout_is_batch_normalize",
        prefix="algorithm",
        changes_meaning=True,
    ),
)
DATA_ROWS = (
    *rows(
        SPEED,
        "use_shm val_batch_size dataloader_num_workers filter_overlong_prompts_workers trust_remote_code",
        prefix="data",
    ),
    *rows(
        "prompts over the limit are an error, or left out",
        "truncation",
        prefix="data",
        changes_meaning=True,
        neutral=("error",),
    ),
    *rows("the tokenizer is the model's own", "tokenizer", prefix="data", changes_meaning=True),
    *rows(
        "rows of the user's own code",
        "custom_cls.path custom_cls.name sampler.class_path sampler.class_name datagen.path datagen.name",
        prefix="data",
        changes_meaning=True,
    ),
    *rows(
        "turns and tools are the environment's",
        "tool_config_path function_tool_path",
        prefix="data",
        changes_meaning=True,
    ),
    *rows("an image is a part of its message", "image_key", prefix="data", changes_meaning=True, neutral=("images",)),
    *rows("no video and no sound is read", "video_key", prefix="data", changes_meaning=True, neutral=("videos",)),
    *rows("no video and no sound is read", "audio_key", prefix="data", changes_meaning=True, neutral=("audios",)),
    *rows("the processor is the model's own", "mm_processor_kwargs mm_processor_kwargs.*", prefix="data", changes_meaning=True),
    *rows("patches are the model's own", "image_patch_size", prefix="data"),
    *rows(
        "what rows keep for verl's own code",
        "return_raw_input_ids return_raw_chat return_full_prompt return_multi_modal_inputs",
        prefix="data",
    ),
    *rows(REWARDS, "reward_fn_key", prefix="data", changes_meaning=True, neutral=("data_source",)),
    *rows("all held-out rows are measured", "validation_shuffle", prefix="data"),
)
TRAINER_ROWS = (
    *rows(
        "a run has run.num_steps; its data begin anew as often as these need",
        "total_epochs",
        prefix="trainer",
        changes_meaning=True,
    ),
    *rows(
        LOGS,
        "logger log_val_generations rollout_data_dir validation_data_dir esi_redundant_time default_hdfs_dir default_local_dir "
        "del_local_ckpt_after_load max_critic_ckpt_to_keep",
        prefix="trainer",
    ),
    *rows(
        SPEED,
        "balance_batch ray_wait_register_center_timeout device use_v1 use_legacy_worker_impl v1.sync "
        "v1.colocate_async.num_warmup_batches v1.separate_async.num_warmup_batches",
        prefix="trainer",
    ),
    *rows(
        "rlcore train --resume goes on with a run",
        "resume_mode",
        prefix="trainer",
        changes_meaning=True,
        neutral=("auto", "disable"),
    ),
    *rows("rlcore train --resume goes on with a run", "resume_from_path", prefix="trainer", changes_meaning=True),
    *rows("async.max_staleness", "v1.trainer_mode", prefix="trainer", changes_meaning=True, neutral=("sync",)),
    *rows("of a trainer_mode that is not sync", "v1.separate_async.parameter_sync_step", prefix="trainer"),
    *rows(
        "of a trainer_mode that is not sync",
        "enable_switch switch_threshold_ratio adaptive_switch_threshold switch_threshold_step_up switch_threshold_step_down "
        "switch_threshold_release_steps switch_cost_window_size _target_",
        prefix="trainer.v1.separate_async.hybrid_rollout",
    ),
    *rows("async.max_staleness", "max_off_policy_threshold", prefix="trainer.v1.sampler", changes_meaning=True, neutral=(8,)),
    *rows("async.on_stale", "max_off_policy_strategy", prefix="trainer.v1.sampler", changes_meaning=True, neutral=("drop",)),
    *rows("rollout.on_environment_error", "sync_refill_failed_groups", prefix="trainer.v1.sampler", changes_meaning=True),
    *rows(
        "prompts are drawn by [data.train]",
        "custom_sampler.path custom_sampler.name sampler_kwargs",
        prefix="trainer.v1.sampler",
        changes_meaning=True,
    ),
)
REWARD_ROWS = (
    *rows(CLASS, "_target_ reward_manager._target_ reward_manager.module._target_", prefix="reward"),
    *rows(CLASS, "reward_model._target_ reward_model.rollout._target_ sandbox_fusion._target_", prefix="reward"),
    *rows(CLASS, "reward_manager._target_ reward_manager.module._target_ reward_model.rollout._target_"),
    *rows(SPEED, "reward.num_workers reward_model.num_workers"),
    *rows(FUNCTION, "custom_reward_function.path reward.custom_reward_function.path", changes_meaning=True),
    *rows(
        FUNCTION,
        "custom_reward_function.name reward.custom_reward_function.name",
        changes_meaning=True,
        neutral=("compute_score",),
    ),
    *rows(FUNCTION, "custom_reward_function.reward_kwargs.*", changes_meaning=True),
    *rows(FUNCTION, "reward.custom_reward_function.reward_kwargs.*", changes_meaning=True),
    *rows(
        REWARDS,
        "reward.reward_manager.source reward_manager.source reward_model.reward_loop_source",
        changes_meaning=True,
        neutral=("register",),
    ),
    *rows(
        REWARDS,
        "reward.reward_manager.module.path reward_manager.module.path reward_model.reward_loop_module_path "
        "reward_model.reward_loop_class_name",
        changes_meaning=True,
    ),
    *rows(LOGS, "reward.reward_manager.module.name reward_manager.module.name"),
    *rows(LOGS, "reward.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.overlong_buffer_cfg.log"),
    *rows(
        "programs run in the environment code",
        "reward.sandbox_fusion.url reward_model.sandbox_fusion.url sandbox_fusion.url",
        changes_meaning=True,
    ),
    *rows(
        "of the service for programs",
        "reward.sandbox_fusion.max_concurrent reward.sandbox_fusion.memory_limit_mb reward_model.sandbox_fusion.max_concurrent "
        "reward_model.sandbox_fusion.memory_limit_mb sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb",
    ),
    *rows(SPEED, "enable_resource_pool n_gpus_per_node nnodes", prefix="reward.reward_model"),
    *rows(
        SPEED,
        f"{_ENGINE} pipeline_model_parallel_size layered_summon scheduling_policy full_determinism seed multi_stage_wake_up",
        prefix="reward.reward_model.rollout",
    ),
    *rows(
        "a reward model scores, and samples nothing",
        "ignore_eos temperature top_k top_p do_sample n quantization quantization_config_file mtp",
        prefix="reward.reward_model.rollout",
    ),
    *rows(SPEED, DISAGGREGATION, prefix="reward.reward_model.rollout.disaggregation"),
    *rows(
        SPEED,
        "enable_resource_pool n_gpus_per_node nnodes strategy micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz "
        "forward_max_token_len_per_gpu launch_reward_fn_async ulysses_sequence_parallel_size use_reward_loop "
        "nccl_timeout load_weight "
        "model.use_shm model.use_remove_padding model.use_fused_kernels model.trust_remote_code "
        "model.fsdp_config._target_ model.fsdp_config.wrap_policy.min_num_params model.fsdp_config.param_offload "
        "model.fsdp_config.reshard_after_forward model.fsdp_config.fsdp_size model.fsdp_config.forward_prefetch",
        prefix="reward_model",
    ),
    *rows(SPEED, _ENGINE, prefix="reward_model.rollout"),
    *rows(
        "where the reward model computes",
        "_target_ context_parallel_size dtype expert_model_parallel_size expert_tensor_parallel_size "
        "override_transformer_config param_offload pipeline_model_parallel_size seed sequence_parallel "
        "tensor_model_parallel_size use_distributed_optimizer use_mbridge use_remove_padding vanilla_mbridge "
        "virtual_pipeline_model_parallel_size",
        prefix="reward_model.megatron",
    ),
    *rows("where the reward model computes", "reward_model.megatron.override_transformer_config.*"),
    *rows(
        "environment.reward_model.path has the weights",
        "dist_checkpointing_path dist_checkpointing_prefix use_dist_checkpointing",
        prefix="reward_model.megatron",
        changes_meaning=True,
    ),
    *rows(
        "the reward model's own length, tokenizer and configuration count",
        "max_length model.input_tokenizer model.override_config model.external_lib",
        prefix="reward_model",
        changes_meaning=True,
    ),
)
DISTILLATION_ROWS = (
    *rows(CLASS, "_target_ distillation_loss._target_", prefix="distillation"),
    *rows(SPEED, "n_gpus_per_node nnodes", prefix="distillation"),
    *rows("where the teacher computes", _TEACHER, prefix="distillation.teacher_models.teacher_model"),
    *rows("of several teachers", "teacher_key", prefix="distillation"),
    *rows("of other losses of distillation", "topk policy_loss_mode", prefix="distillation.distillation_loss"),
    *rows(
        "ratios are cut at importance_maximum",
        "clip_ratio clip_ratio_low clip_ratio_high",
        prefix="distillation.distillation_loss",
    ),
    *rows(
        "the loss has no other term",
        "distillation_loss_coef",
        prefix="distillation.distillation_loss",
        changes_meaning=True,
        neutral=(1,),
    ),
    *rows(
        "a token's divergence is within ±20",
        "loss_max_clamp log_prob_min_clamp",
        prefix="distillation.distillation_loss",
        changes_meaning=True,
    ),
)
OTHER_ROWS = (
    *rows(SPEED, "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout"),
    *rows("which files are composed, whose keys are read", "model_engine"),
    *rows(
        "earlier samples are not read in place of new ones",
        "skip.rollout.enable skip.rollout_tq.enable skip.async_rollout.enable",
        changes_meaning=True,
    ),
    *rows("of samples that are read again", "dump_dir steps action", prefix="skip.rollout"),
    *rows("of samples that are read again", "dump_dir steps action", prefix="skip.rollout_tq"),
    *rows("of samples that are read again", "dump_dir steps action", prefix="skip.async_rollout"),
    *rows(CLASS, "skip._target_"),
    *rows("an argument of ray.init", "ray_kwargs.ray_init.* ray_init.*"),
    *rows(LOGS, "ray_kwargs.timeline_json_file"),
    *rows(
        SPEED,
        "enable backend.storage_backend backend.MooncakeStore.auto_init backend.MooncakeStore.device_name "
        "backend.MooncakeStore.global_segment_size backend.MooncakeStore.local_buffer_size "
        "backend.MooncakeStore.local_hostname backend.MooncakeStore.master_server_address "
        "backend.MooncakeStore.metadata_server backend.MooncakeStore.protocol "
        "backend.SimpleStorage.num_data_storage_units backend.SimpleStorage.total_storage_size metrics.enabled metrics.port",
        prefix="transfer_queue",
    ),
    *rows(LOGS, f"{_PROFILER} profile_continuous_steps steps", prefix="global_profiler"),
    *rows(
        LOGS,
        "nsys._target_ nsys.discrete torch_memory.context torch_memory.kw_args torch_memory.stacks torch_memory.stack_depth "
        "torch_memory.trace_alloc_max_entries precision_debugger._target_ precision_debugger.config_path "
        "precision_debugger.stages precision_debugger.steps precision_debugger.strict",
        prefix="global_profiler.global_tool_config",
    ),
    *rows(
        "an option of nsys",
        "controller_nsight_options.* worker_nsight_options.*",
        prefix="global_profiler.global_tool_config.nsys",
    ),
    *(
        row
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout", "critic", "reward_model")
        for row in (
            *rows(LOGS, f"{_PROFILER} all_ranks enable ranks tool_config", prefix=f"{role}.profiler"),
            *(row for tool, keys in _TOOLS.items() for row in rows(LOGS, keys, prefix=f"{role}.profiler.tool_config.{tool}")),
        )
    ),
)
