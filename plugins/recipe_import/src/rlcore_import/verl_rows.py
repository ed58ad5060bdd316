"""verl's keys without a counterpart, each with the reason: actor, reference, rollout, critic and model."""

from rlcore_import.source import Dropped, differs, same
from rlcore_import.verl_other_rows import (
    ALGORITHM_ROWS,
    CLASS,
    DATA_ROWS,
    DISAGGREGATION,
    DISTILLATION_ROWS,
    LOGS,
    OTHER_ROWS,
    REWARD_ROWS,
    SPEED,
    TRAINER_ROWS,
)

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
POLICY_LOSS, CORRECTION = f"{ACTOR}.policy_loss", "algorithm.rollout_correction"
LAYOUT = "where the reference computes: here it lies where the policy does"
WEIGHTS = "a model begins with its own weights"
TOOLS = "turns and tools are the environment's"
FLOAT32, BFLOAT16 = ("fp32", "float32", "32"), ("bfloat16", "bf16")
SEED = "run.seed counts: the same but for chance"

_QAT = "qat.mode qat.group_size qat.ignore_patterns qat.activation_observer qat.quantization_config_path"
_CHUNKS = "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing"
_COMMON = f"{_CHUNKS} param_offload optimizer_offload strategy forward_only use_torch_compile forward_prefetch"
_COMMON += " wrap_policy.min_num_params use_orig_params pad_to_length pad_to_length_bucket full_determinism"
_FSDP = f"{_COMMON} offload_policy reshard_after_forward fsdp_size ulysses_sequence_parallel_size"
_TURBO = (
    "fully_shard_parallel_size tensor_parallel_size expert_parallel_size expert_fully_shard_parallel_size "
    "ulysses_parallel_size fsdp_plan.fsdp_implementation "
    "fsdp_plan.num_to_forward_prefetch fsdp_plan.num_to_backward_prefetch"
)
_FSDP += "".join(f" turbo_config.distributed.{name}" for name in _TURBO.split())
_MEGATRON = (
    f"{_COMMON} grad_offload tensor_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size sequence_parallel "
    "use_distributed_optimizer dynamic_context_parallel "
    "max_seqlen_per_dp_cp_rank "
    "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient use_mbridge "
    "vanilla_mbridge use_remove_padding pad_bshd_to_minibatch_max use_megatron_fsdp router_replay.record_file "
    "router_replay.replay_file"
)
_VEOMNI = (
    f"{_COMMON} fsdp_size ulysses_parallel_size expert_parallel_size init_device enable_full_shard ckpt_manager "
    "enable_fsdp_offload enable_reentrant attn_implementation moe_implementation "
    "cross_entropy_loss_implementation rms_norm_implementation swiglu_mlp_implementation rotary_pos_emb_implementation "
    "rms_norm_gated_implementation causal_conv1d_implementation chunk_gated_delta_rule_implementation "
    "load_balancing_loss_implementation dsa_indexer_implementation dsa_attention_implementation mhc_implementation "
    "force_use_huggingface activation_gpu_limit basic_modules"
)
_TORCHTITAN = (
    f"{_COMMON} reshard_after_forward data_parallel_size data_parallel_replicate_size data_parallel_shard_size "
    "tensor_parallel_size expert_parallel_size pipeline_parallel_size context_parallel_size attn_type spmd_backend "
    "activation_checkpoint max_seq_len"
)


def _numbers(table: str) -> tuple[Dropped, ...]:
    """Return the rows of an engine's options that change numbers."""
    plan = f"{table}.turbo_config.distributed.fsdp_plan"
    of_plan = (
        *differs(plan, "model.dtype", "param_dtype output_dtype", *BFLOAT16),
        *differs(plan, "sums are of float32", "reduce_dtype", *FLOAT32),
        *differs(table, "master weights are float32", "model_dtype", *FLOAT32),
    )
    return (
        *same(table, SEED, "seed"),
        *differs(table, "model.dtype", "dtype", *BFLOAT16),
        *(of_plan if "fsdp" in table else ()),
    )


def _engines(role: str, fsdp: str, why: str) -> tuple[Dropped, ...]:
    """Sizes, offloading and kernels of the engines of a role, and what of them changes numbers."""
    tables = {fsdp: _FSDP, f"{role}.megatron": _MEGATRON, f"{role}.veomni": _VEOMNI, f"{role}.torchtitan": _TORCHTITAN}
    return (
        *(row for table, keys in tables.items() for row in same(table, why, keys)),
        *(row for table in tables for row in _numbers(table)),
        *same(" ".join(tables), CLASS, "_target_ qat._target_ router_replay._target_"),
        *differs(
            f"{role}.megatron",
            "trainer.megatron.pretrained_checkpoint holds the initial weights",
            "use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix",
        ),
        *differs("", "the model's own weights are the initial ones", f"{role}.veomni.load_checkpoint_path"),
        *differs(fsdp, "sums are of float32", "mixed_precision.reduce_dtype", *FLOAT32),
        *differs(fsdp, "model.dtype", "mixed_precision.param_dtype mixed_precision.buffer_dtype"),
        *differs(f"{fsdp} {role}.megatron", "weights are not quantised while they train", f"qat.enable {_QAT}"),
        *differs(role, "compute is in model.dtype", "veomni.mixed_precision", True),
        *differs(role, "compute is in model.dtype", "torchtitan.mixed_precision", False, True),
        *same("", why, f"{role}.megatron.router_replay.mode {role}.veomni.router_replay.mode"),
        *differs(f"{role}.megatron", "trainer.megatron.ddp takes Megatron's keys", "override_ddp_config override_ddp_config.*"),
        *differs(
            f"{role}.megatron",
            "trainer.megatron.transformer takes Megatron's keys",
            "override_mcore_model_config override_mcore_model_config.* override_transformer_config "
            "override_transformer_config.*",
        ),
        *same(f"{role}.megatron.override_transformer_config", SPEED, "recompute_granularity recompute_modules"),
        *same(f"{role}.megatron.override_transformer_config", SPEED, "recompute_method recompute_num_layers attention_backend"),
    )


def _optimizer(prefix: str) -> tuple[Dropped, ...]:
    """Return the rows of an optimizer's options."""
    return (
        *same(prefix, CLASS, "_target_"),
        *same(prefix, "the run's steps, which verl's trainer puts here", "total_training_steps"),
        *differs(prefix, "AdamW and Muon are torch's, moments in 8 bits torchao's", "optimizer_impl", "torch.optim"),
        *differs(
            prefix,
            "trainer.megatron.optimizer takes Megatron's keys; AdamW has no others under fsdp2",
            "override_optimizer_config override_optimizer_config.*",
        ),
        *differs(prefix, "the warm-up begins at 0", "lr_warmup_init lr_start", 0),
        *differs(prefix, "a cosine has one half-wave", "num_cycles", 0.5),
        *differs(prefix, "the decay ends with the run", "lr_decay_ratio", 1),
        *differs(prefix, "the rate is that of one step earlier", "zero_indexed_step", True),
        *differs(prefix, "weight decay is constant", "weight_decay_incr_style", "constant"),
        *differs(prefix, "no such decay", "lr_wsd_decay_steps"),
        *same(prefix, "of a decay that lr_wsd_decay_steps has", "lr_wsd_decay_style"),
        *differs(prefix, "moments and gradients are float32", "main_grads_dtype exp_avg_dtype exp_avg_sq_dtype", *FLOAT32),
        *same(prefix, "moments are those of their dtypes", "use_precision_aware_optimizer"),
        *differs(prefix, "the schedule is the recipe's", "use_checkpoint_opt_param_scheduler"),
        *same(
            prefix,
            "of Muon, whose options here are those of optimizer.muon",
            "use_layer_wise_distributed_optimizer muon_momentum muon_nesterov muon_split_qkv muon_scale_mode "
            "muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_fp32_matmul_prec muon_extra_scale_factor "
            "muon_match_adamw_update_rms",
        ),
        *differs(prefix, "tensors that Muon leaves out train with AdamW", "muon_scalar_optimizer", "adam", "adamw"),
    )


def _model(prefix: str) -> tuple[Dropped, ...]:
    """Return the rows of a model's options: those of numbers, and those of speed."""
    return (
        *same(prefix, CLASS, "_target_ mtp._target_"),
        *same(prefix, SPEED, "use_shm enable_activation_offload use_remove_padding use_liger use_fused_kernels"),
        *same(prefix, SPEED, "fused_kernel_options.impl_backend tiled_mlp.enabled tiled_mlp.num_shards lora.merge"),
        *same(prefix, SPEED, "lora.a2a_experimental"),
        *differs(prefix, "code that a model brings is not imported", "external_lib"),
        *differs(prefix, "the model's config.json counts as it is", "hf_config_path"),
        *differs(
            prefix,
            "the model's config.json counts as it is",
            "override_config override_config.model_config override_config.moe_config.freeze_moe_router override_config.*",
        ),
        *differs(prefix, "adapters are those of LoRA", "lora.type", "lora"),
        *differs(prefix, "dropout is before A", "lora.dropout_position", "pre"),
        *differs(prefix, "adapters are float32", "lora.dtype"),
        *differs(prefix, "A begins as PEFT's does, uniform in ±1/√in", "lora.lora_A_init_method"),
        *differs(prefix, "B begins at zero", "lora.lora_B_init_method", "zero"),
        *differs(
            prefix,
            "adapters train in the language model alone",
            "lora.freeze_vision_model lora.freeze_vision_projection lora.freeze_language_model",
            True,
        ),
        *differs(prefix, "trainer.megatron.mtp trains a head that predicts further tokens", "mtp.enable mtp.enable_train"),
        *same(
            prefix,
            "of a head that predicts further tokens: trainer.megatron.mtp and generator.vllm.speculative_method",
            "mtp.enable_rollout mtp.detach_encoder mtp.mtp_loss_scaling_factor mtp.speculative_algorithm "
            "mtp.speculative_num_steps mtp.speculative_eagle_topk mtp.speculative_num_draft_tokens mtp.method "
            "mtp.num_speculative_tokens",
        ),
    )


_ACTOR_ROWS = (
    *same(ACTOR, CLASS, "_target_ policy_loss._target_ checkpoint._target_ router_replay._target_"),
    *same(
        ACTOR,
        SPEED,
        f"{_CHUNKS} use_torch_compile use_fused_kernels use_remove_padding use_prefix_grouper pad_to_length "
        "rollout_n "
        "sum_pi_squared_checkpointing calculate_entropy",
    ),
    *same(f"{ACTOR}.checkpoint", LOGS, "save_contents load_contents async_save strict mbridge_config"),
    *differs(ACTOR, WEIGHTS, "load_weight", True),
    *same(ACTOR, "older names of keys that count for each GPU", "ppo_micro_batch_size"),
    *differs(ACTOR, "the order of groups within a step is that of their prompts", "shuffle"),
    *same(ACTOR, "of shuffle", "data_loader_seed"),
    *same(ACTOR, "of estimators that are not here", "calculate_sum_pi_squared"),
    *differs(ACTOR, "of the loss dro, which is not here", "policy_loss.dro_beta"),
    *same(ACTOR, LOGS, "router_replay.record_file router_replay.replay_file"),
    *differs(ACTOR, "weights are not quantised while they train", f"qat.enable {_QAT}"),
    *differs(
        ACTOR,
        'importance_correction = "token" with this importance_maximum, in verl before rollout_correction',
        "tis_imp_ratio_cap",
        -1,
        0,
    ),
    *differs(ACTOR, 'previous_logprobs = "generation"', "use_rollout_log_probs"),
    *_engines(ACTOR, f"{ACTOR}.fsdp_config", SPEED),
    *_optimizer(f"{ACTOR}.optim"),
)
_REF_ROWS = (
    *same(
        REF,
        LAYOUT,
        f"{_CHUNKS} rollout_n strategy use_torch_compile log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu router_replay.mode router_replay.record_file load_weight "
        "router_replay.replay_file router_replay._target_ ulysses_sequence_parallel_size pad_to_length _target_",
    ),
    *_engines(REF, f"{REF}.fsdp_config", LAYOUT),
    *same(
        f"{REF}.optim",
        "a reference is not trained",
        "_target_ name lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps betas clip_grad eps "
        "decay_type min_lr_factor",
    ),
)
_ROLLOUT_ROWS = (
    *same(ROLLOUT, CLASS, "_target_ val_kwargs._target_ multi_turn._target_ agent._target_ agent.custom_async_server._target_"),
    *same(ROLLOUT, CLASS, "checkpoint_engine._target_ trace._target_ prometheus._target_"),
    *same(ROLLOUT, SPEED, "mode nnodes n_gpus_per_node full_determinism cudagraph_capture_sizes data_parallel_size"),
    *same(ROLLOUT, SPEED, "expert_parallel_size pipeline_model_parallel_size moe_tensor_parallel_size enable_chunked_prefill"),
    *same(ROLLOUT, SPEED, "scheduling_policy load_format layered_summon log_prob_micro_batch_size"),
    *same(ROLLOUT, SPEED, "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu"),
    *same(ROLLOUT, SPEED, "disable_log_stats multi_stage_wake_up skip_tokenizer_init enable_sleep_mode"),
    *same(ROLLOUT, SPEED, "standalone_gpu_memory_utilization layer_name_map.qkv_layer_name"),
    *same(ROLLOUT, SPEED, "layer_name_map.gate_proj_layer_name"),
    *same(ROLLOUT, SEED, "seed"),
    *same(ROLLOUT, LOGS, "moe_load_balance_metrics_interval"),
    *differs(ROLLOUT, "model.dtype", "dtype", "bfloat16"),
    *differs(ROLLOUT, "an answer ends with its end token", "ignore_eos"),
    *differs(ROLLOUT, "samples are drawn", "do_sample", True),
    *differs(ROLLOUT, "no token is penalised", "repetition_penalty", 1),
    *differs(ROLLOUT, "no token is penalised", "presence_penalty frequency_penalty", 0),
    *differs(ROLLOUT, "rollout.top_p and top_k alone cut a distribution", "min_p", 0),
    *differs(ROLLOUT, "log-probabilities are those that were sampled from", "logprobs_mode", "processed_logprobs"),
    *differs(ROLLOUT, "generator.vllm.quantization", "quantization quantization_config_file"),
    *differs(ROLLOUT, "async.extra_prompts", "over_sample_rate", 0),
    *differs(ROLLOUT, "earlier samples are not read in place of new ones", "skip_rollout"),
    *same(ROLLOUT, LOGS, "skip_dump_dir"),
    *same(ROLLOUT, "drafts of the next tokens: generator.vllm.speculative_method", "mtp mtp.*"),
    *same(ROLLOUT, "as the actor's", "qat qat.*"),
    *differs(ROLLOUT, TOOLS, "agent.default_agent_loop", "single_turn_agent"),
    *differs(ROLLOUT, TOOLS, "agent.agent_loop_config_path agent.custom_async_server.path agent.custom_async_server.name"),
    *differs(ROLLOUT, TOOLS, "multi_turn.max_assistant_turns multi_turn.max_user_turns multi_turn.tool_config_path"),
    *differs(ROLLOUT, TOOLS, "multi_turn.function_tool_path multi_turn.interaction_config_path multi_turn.num_repeat_rollouts"),
    *differs(ROLLOUT, TOOLS, "multi_turn.use_inference_chat_template"),
    *differs(ROLLOUT, TOOLS, "multi_turn.max_parallel_calls", 1),
    *differs(ROLLOUT, TOOLS, "multi_turn.max_tool_response_length", 256),
    *differs(ROLLOUT, TOOLS, "multi_turn.tool_response_truncate_side", "middle"),
    *differs(ROLLOUT, "rollout.tool_parser", "multi_turn.format", "hermes"),
    *same(ROLLOUT, LOGS, "multi_turn.tokenization_sanity_check_mode"),
    *same(ROLLOUT, SPEED, "agent.num_workers"),
    *differs(ROLLOUT, "generator.vllm.engine takes vLLM's arguments", "engine_kwargs.vllm engine_kwargs.vllm.*"),
    *same(
        ROLLOUT,
        "of an engine that is not taken",
        "engine_kwargs.sglang engine_kwargs.trtllm engine_kwargs.sglang.* engine_kwargs.trtllm.*",
    ),
    *same(ROLLOUT, LOGS, "trace.* prometheus.*"),
    *same(f"{ROLLOUT}.checkpoint_engine", SPEED, "backend custom_backend_module engine_kwargs update_weights_bucket_megabytes"),
    *same("", "an argument of verl's checkpoint engine", f"{ROLLOUT}.checkpoint_engine.engine_kwargs.*"),
    *same(f"{ROLLOUT}.disaggregation", SPEED, DISAGGREGATION),
)
_CRITIC_ROWS = (
    *same("critic", CLASS, "_target_ checkpoint._target_"),
    *same("critic.checkpoint", LOGS, "save_contents load_contents async_save mbridge_config"),
    *same("critic", SPEED, "rollout_n strategy enable ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz"),
    *same("critic", SPEED, "ppo_max_token_len_per_gpu forward_max_token_len_per_gpu forward_micro_batch_size"),
    *same("critic", SPEED, "forward_micro_batch_size_per_gpu ulysses_sequence_parallel_size nccl_timeout data_loader_seed"),
    *same("critic", SPEED, "model.enable_gradient_checkpointing model.trust_remote_code"),
    *differs("critic", WEIGHTS, "load_weight", True),
    *differs("critic", "the order of groups within a step is that of their prompts", "shuffle"),
    *differs("critic", "of aggregations that the critic has not", "loss_scale_factor"),
    *same("critic", "the critic has the policy's tokenizer", "model.tokenizer_path model.custom_chat_template"),
    *differs("critic.model", "all of the critic's weights train", "lora_rank lora.rank", 0),
    *differs(
        "critic.model",
        "all of the critic's weights train",
        "lora_adapter_path lora.adapter_path exclude_modules lora.exclude_modules",
    ),
    *same(
        "critic.model",
        "of adapters, which a critic has none of",
        "lora_alpha target_modules lora.alpha lora.dropout lora.target_modules",
    ),
    *_engines("critic", "critic.fsdp", SPEED),
    *same("critic.model.fsdp_config", SPEED, f"{_FSDP} _target_"),
    *_numbers("critic.model.fsdp_config"),
    *_optimizer("critic.optim"),
    *_model("critic.model"),
)
ROWS = (
    *_ACTOR_ROWS,
    *_REF_ROWS,
    *_model(MODEL),
    *_ROLLOUT_ROWS,
    *_CRITIC_ROWS,
    *ALGORITHM_ROWS,
    *DATA_ROWS,
    *TRAINER_ROWS,
    *REWARD_ROWS,
    *DISTILLATION_ROWS,
    *OTHER_ROWS,
)
"""Keys without a counterpart; the first row counts."""
