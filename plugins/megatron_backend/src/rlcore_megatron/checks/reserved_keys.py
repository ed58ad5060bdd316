"""Fields of Megatron's classes that a recipe may not set, each with the key that decides it or the reason."""

from rlcore_megatron.layouts.layout_check import SECTION

_SET = "Set {}"
_MODEL = "Leave it out: it follows from the model at model.path"
_WEIGHTS = "Leave it out: the weights are read from model.path"
_DTYPE = "Set model.dtype"
_LEAVE = "Leave it out: {}"
_METHOD = "Set [optimizer], which means the same under every trainer"
_MUON = (
    "Set [optimizer.muon], which means the same under every trainer: Megatron's own Muon takes fused parameters for matrices"
)
_STAGES = f"Set {SECTION}.pipeline_layers instead, a number for each stage"
_SHARDED = "Leave it out: it needs use_megatron_fsdp; the trainer fsdp2 divides weights over data-parallel ranks"
_NO_GRAPHS = "Leave it out: a CUDA graph has one shape, and packed microbatches have many"
_CONTEXT = "Leave it out: context ranks exchange tokens for heads, over packed sequences of any lengths"
_LOSSES = "Leave it out: losses are the algorithm's, and log-probabilities are computed in chunks already"
_ATTENTION = "Leave it out: attention over packed sequences is the trainer's own, and keeps no scores"
_OTHER_EXPERTS = "Leave it out: its experts' weights lie in another order, and need another package"
_KEPT_DTYPE = "Leave it out: weights are kept in model.dtype"
_KITCHEN = "Leave it out: Kitchen's layers need a quant_recipe, an object that no recipe can hold"
_NO_GENERATION = "Leave it out: the trainer does not generate"
_NO_DROPOUT = "Leave it out: dropout would part the trainer's log-probabilities from the generator's"
_ALONE = "Leave it out: a token's log-probability would depend on the other tokens of its microbatch, or on chance"
_NO_SCALE = "Leave it out: without float16 no loss is scaled"
_RATE = "Leave it out: the rate of a step follows from its number, which checkpoints hold"
_CHECKED = "Leave it out: the trainer checks gradients itself, and keeps the state before a step that has none"
_BUFFERS = "Leave it out: buffers give their memory to the generator between steps, and NCCL would hold on to it"
_OVERLAP = "Leave it out: it needs a training step that is built around it"


_OTHER_LAYERS = "Leave it out: its layers hold their weights in another form than model.path has them"
_DIVIDED = "Leave it out: tensor and expert ranks divide weights, and the distributed optimizer the rest"
_UNTRIED = "Leave it out: no training was tried with it"


def _owned(remedy: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), remedy)


NEWER_KEYS: dict[str, dict[str, str]] = {
    "transformer": {
        **_owned(
            _MODEL,
            "use_mup mup_output_mult mup_width_mult mup_base_head_dim mup_base_hidden_size mup_attn_scale_power "
            "mup_embedding_mult mtp_use_repeated_layer mtp_hybrid_override_pattern mtp_detach_heads dsa_kernel_backend "
            "dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_skip_topk_offset dsa_indexer_k_norm_fp32 "
            "dsa_indexer_rope_interleaved dsa_indexer_topk_freq dsa_indexer_rotate_activation "
            "mamba_training_ssm_states_dtype",
        ),
        **_owned(
            _OTHER_LAYERS,
            "use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert "
            "moe_single_grouped_weight moe_single_grouped_bias moe_mlp_glu_interleave_size "
            "moe_shared_expert_glu_interleave_size",
        ),
        **_owned(
            _DIVIDED,
            "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards gtp_weight_remat_size "
            "expert_gtp_weight_remat_size",
        ),
        **_owned(
            _NO_GENERATION,
            "nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels inference_cuda_graph_scope "
            "inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type inference_grouped_gemm_backend "
            "moe_pad_experts_for_cuda_graph_inference",
        ),
        **_owned(_NO_GRAPHS, "cuda_graph_modules delay_offload_until_cuda_graph"),
        **_owned(_OVERLAP, "overlap_dispatch_backward_with_experts_wgrad high_priority_a2a_comm_stream"),
        **_owned(_ALONE, "moe_expert_rank_capacity_factor moe_router_force_biased moe_router_quantile_balancing_ema"),
        **_owned(
            _UNTRIED,
            "fused_residual_rmsnorm moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
            "moe_paged_stash_buffer_size_factor_cpu",
        ),
        "fp8_output_proj": _LOSSES,
    },
    "optimizer": {
        **_owned(_MUON, "muon_nesterov muon_coefficient_type muon_scalar_optimizer"),
        **_owned(
            _METHOD,
            "adaptive_muon_moment2_method adaptive_muon_eps adaptive_muon_beta2 lion_beta1 lion_beta2 "
            "soap_precondition_frequency soap_shampoo_beta soap_use_kl_shampoo",
        ),
        "use_layer_wise_distributed_optimizer": _LEAVE.format("the optimizer is Megatron's distributed one"),
        "optimizer_cuda_graph": _UNTRIED,
        "grad_norm_skip_threshold": _CHECKED,
    },
    "scheduler": {},
    "ddp": {
        "fp4_param_gather": _KEPT_DTYPE,
        **_owned(
            _SHARDED,
            "megatron_fsdp_cuda_graph_mode megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad "
            "megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype megatron_fsdp_enable_fine_grained_param_gather "
            "megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync",
        ),
    },
}
"""The reserved fields that Megatron-Core 0.16 lacks, by table."""

RESERVED_KEYS: dict[str, dict[str, str]] = {
    "transformer": {
        **NEWER_KEYS["transformer"],
        "tensor_model_parallel_size": _SET.format(f"{SECTION}.tensor_parallel"),
        "pipeline_model_parallel_size": _SET.format(f"{SECTION}.pipeline_parallel"),
        "virtual_pipeline_model_parallel_size": _SET.format(f"{SECTION}.virtual_pipeline_parallel"),
        "context_parallel_size": _SET.format(f"{SECTION}.context_parallel"),
        "expert_model_parallel_size": _SET.format(f"{SECTION}.expert_parallel"),
        "expert_tensor_parallel_size": _SET.format(f"{SECTION}.expert_tensor_parallel"),
        "sequence_parallel": _SET.format(f"{SECTION}.sequence_parallel"),
        "recompute_granularity": _SET.format(f"{SECTION}.recompute"),
        "transformer_impl": _SET.format(f"{SECTION}.transformer_engine"),
        "fp8": _SET.format(f"{SECTION}.fp8"),
        "moe_enable_routing_replay": _SET.format("rollout.replay_routing"),
        "moe_layer_recompute": f'Set {SECTION}.recompute to "selective", and transformer.recompute_modules',
        **_owned(
            _MODEL,
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
            "layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm gated_linear_unit add_bias_linear "
            "add_qkv_bias activation_func activation_func_clamp_value glu_linear_offset num_moe_experts moe_ffn_hidden_size "
            "moe_layer_freq moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_num_groups "
            "moe_router_group_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor "
            "moe_router_enable_expert_bias moe_router_bias_update_rate moe_shared_expert_intermediate_size "
            "moe_shared_expert_gate moe_latent_size moe_apply_probs_on_input rotary_interleaved window_size "
            "window_attn_skip_freq softmax_scale softmax_type no_rope_freq mrope_section multi_latent_attention "
            "experimental_attention_variant attention_output_gate apply_residual_connection_post_layernorm mtp_num_layers "
            "mtp_loss_scaling_factor mtp_standalone is_hybrid_model heterogeneous_block_specs linear_attention_freq "
            "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
            "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss "
            "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path",
        ),
        **_owned(
            _WEIGHTS,
            "perform_initialization use_cpu_initialization init_model_with_meta_device init_method_std "
            "embedding_init_method_std init_method output_layer_init_method embedding_init_method",
        ),
        **_owned(_DTYPE, "params_dtype bf16 fp16 pipeline_dtype autocast_dtype enable_autocast"),
        "fp32_residual_connection": _LEAVE.format(
            "Megatron rounds every sum to model.dtype again, and layers in bfloat16 fail over the float32 of the first"
        ),
        **_owned(
            _STAGES,
            "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        ),
        **_owned(
            _CONTEXT,
            "cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank",
        ),
        **_owned(
            _LOSSES,
            "cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute wgrad_deferral_limit",
        ),
        **_owned(
            _NO_GRAPHS,
            "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool "
            "cuda_graph_retain_backward_graph cuda_graph_warmup_steps",
        ),
        **_owned(
            _OVERLAP,
            "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release tp_comm_overlap",
        ),
        **_owned(
            _ATTENTION,
            "masked_softmax_fusion attention_softmax_in_fp32 apply_query_key_layer_scaling qk_clip qk_clip_alpha "
            "qk_clip_threshold log_max_attention_logit",
        ),
        **_owned(_OTHER_EXPERTS, "moe_use_legacy_grouped_gemm moe_extended_tp"),
        **_owned(_KEPT_DTYPE, "fp8_param fp4_param"),
        "fused_single_qkv_rope": _LEAVE.format("its kernel takes no packed sequences, and the first step would fail"),
        **_owned(_KITCHEN, "use_kitchen use_kitchen_attention kitchen_attention_backend"),
        "microbatch_group_size_per_vp_stage": _LEAVE.format("stages take turns in rounds of one microbatch for each of them"),
        **_owned(
            _NO_GENERATION,
            "flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers "
            "inference_fuse_tp_communication mlp_chunks_for_prefill",
        ),
        **_owned(_NO_DROPOUT, "hidden_dropout attention_dropout"),
        **_owned(
            _ALONE,
            "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_dropping moe_token_drop_policy "
            "moe_input_jitter_eps moe_router_force_load_balancing",
        ),
    },
    "optimizer": {
        **NEWER_KEYS["optimizer"],
        "lr": "Set optimizer.learning_rate",
        "min_lr": "Set schedule.min_learning_rate_ratio",
        "weight_decay": "Set optimizer.weight_decay",
        "adam_beta1": "Set optimizer.betas",
        "adam_beta2": "Set optimizer.betas",
        "adam_eps": "Set optimizer.eps",
        "clip_grad": "Set optimizer.max_grad_norm",
        "overlap_param_gather": f"Set {SECTION}.ddp.overlap_param_gather",
        "fp8_recipe": f"Set {SECTION}.transformer.fp8_recipe",
        "use_distributed_optimizer": _LEAVE.format("it is on"),
        "overlap_param_gather_with_optimizer_step": _OVERLAP,
        **_owned(_DTYPE, "params_dtype bf16 fp16"),
        "main_grads_dtype": f"Set {SECTION}.ddp.grad_reduce_in_fp32",
        "use_torch_optimizer_for_cpu_offload": _LEAVE.format("Megatron reads it for other optimizers than AdamW alone"),
        **_owned(_NO_SCALE, "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
        "optimizer": "Set optimizer.name",
        **_owned(_METHOD, "decoupled_weight_decay sgd_momentum"),
        **_owned(
            _MUON,
            "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps "
            "muon_tp_mode muon_extra_scale_factor",
        ),
    },
    "scheduler": {
        **NEWER_KEYS["scheduler"],
        "optimizer": _LEAVE.format("it is the trainer's"),
        "max_lr": "Set optimizer.learning_rate",
        **_owned(_RATE, "use_checkpoint_opt_param_scheduler override_opt_param_scheduler"),
    },
    "ddp": {
        **NEWER_KEYS["ddp"],
        "use_distributed_optimizer": _LEAVE.format("it is on"),
        "num_distributed_optimizer_instances": _LEAVE.format("the optimizer is divided among all ranks with the same weights"),
        "delay_wgrad_compute": _OVERLAP,
        **_owned(_CHECKED, "check_for_nan_in_grad check_for_large_grads"),
        **_owned(_BUFFERS, "nccl_ub disable_symmetric_registration"),
        **_owned(_KEPT_DTYPE, "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag"),
        **_owned(
            _SHARDED,
            "use_megatron_fsdp use_custom_fsdp outer_dp_sharding_strategy fsdp_double_buffer "
            "fsdp_manual_registration suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache",
        ),
    },
}
"""Table to its fields that other keys decide or that have no place here, each with what to do instead."""
