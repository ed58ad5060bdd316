"""NeMo-RL's keys of the policy and its trainers without a counterpart, each with the reason."""

from rlcore_import.nemo_rl_reasons import DTENSOR, ENVIRONMENT, MEGATRON, ROUNDINGS, SPEED, UNREAD, VIDEO, WRITTEN
from rlcore_import.source import Dropped, rows

QUANTISED = "weights are not quantised while they train"
CONFIG = "the model's config.json counts as it is"
FURTHER = "layers that predict further tokens are left out; see trainer.megatron.mtp"
TOWER = "the tower trains"
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
POLICY_ROWS: tuple[Dropped, ...] = (*_POLICY, *_DTENSOR, *_MEGATRON)
