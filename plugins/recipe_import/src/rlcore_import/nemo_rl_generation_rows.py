"""NeMo-RL's keys of generation without a counterpart, each with the reason."""

from rlcore_import.nemo_rl_reasons import ENVIRONMENT, GEN, LOGS, ROUNDINGS, SPEED, UNREAD, VIDEO
from rlcore_import.source import Dropped, differs, same

ENGINE = "an option of another engine: samples come from vLLM"
ALL_QUANTISED = "all linear layers are quantised"
GENERATION_ROWS: tuple[Dropped, ...] = (
    *same(GEN, SPEED, "port_range_low port_range_high refit_transport use_async_rollouts"),
    *same(GEN, SPEED, "real_quant_export_cpu_offload vllm_kwargs refit_cfg.sparse.baseline.in_memory"),
    *same(GEN, SPEED, "refit_cfg.sparse.delta_compression.encoding refit_cfg.sparse.verify_samples_per_payload"),
    *same(GEN, SPEED, "vllm_cfg.limit_mm_per_prompt.audio vllm_cfg.limit_mm_per_prompt.video"),
    *same(GEN, SPEED, "vllm_kwargs.limit_mm_per_prompt.audio vllm_kwargs.limit_mm_per_prompt.image"),
    *same(GEN, SPEED, "vllm_kwargs.limit_mm_per_prompt.video.count"),
    *same(GEN, SPEED, "vllm_kwargs.kernel_config.enable_flashinfer_autotune"),
    *same(f"{GEN}.refit_cfg.nixl", SPEED, "update_weights_bucket_memory_ratio device backend_name"),
    *same(f"{GEN}.refit_cfg.nixl", SPEED, "backend_init_params release_after_refit shard_expert_weights"),
    *same(f"{GEN}.vllm_cfg", SPEED, "async_engine pipeline_parallel_size expert_parallel_size"),
    *same(f"{GEN}.vllm_cfg", SPEED, "enable_expert_parallel expose_http_server skip_tokenizer_init load_format"),
    *same(f"{GEN}.vllm_cfg", SPEED, "env_vars reset_encoder_cache_after_weight_update http_refit_api_key_env_var"),
    *same(f"{GEN}.vllm_cfg", SPEED, "http_refit_server_port zmq_refit_server_port cap_max_tokens_to_context"),
    *same(f"{GEN}.vllm_kwargs", SPEED, "block_size disable_custom_all_reduce enable_chunked_prefill"),
    *same(f"{GEN}.vllm_kwargs", SPEED, "mm_processor_cache_gb kv_cache_memory_bytes skip_mm_profiling"),
    *same(f"{GEN}.vllm_kwargs", SPEED, "mamba_cache_mode allowed_local_media_path"),
    *same(f"{GEN}.vllm_kwargs.compilation_config", SPEED, "backend cudagraph_capture_sizes cudagraph_mode"),
    *differs(GEN, "no token is forbidden", "bad_words"),
    *differs(GEN, "an answer ends with its end token", "ignore_eos"),
    *differs(GEN, "generator.vllm.quantization knows fp8 alone", "quant_cfg real_quant"),
    *differs(GEN, "generator.vllm.quantization knows fp8 alone", "real_quant_ignore"),
    *same(f"{GEN}.vllm_cfg", LOGS, "use_tqdm enable_vllm_metrics_logger vllm_metrics_logger_interval"),
    *same(f"{GEN}.vllm_cfg", UNREAD, "enable_thinking enforce_monotonicity max_num_seqs"),
    *same(GEN, ROUNDINGS, "vllm_cfg.use_deep_gemm vllm_kwargs.compilation_config.custom_ops"),
    *same(GEN, ROUNDINGS, "vllm_kwargs.compilation_config.pass_config.fuse_allreduce_rms"),
    *same(GEN, ROUNDINGS, "vllm_kwargs.attention_config.use_trtllm_attention vllm_kwargs.kernel_config.moe_backend"),
    *same(f"{GEN}.vllm_kwargs", ROUNDINGS, "attention_backend moe_backend mamba_ssm_cache_dtype"),
    *differs(f"{GEN}.vllm_cfg.video", VIDEO, "num_frames sampling_style temporal_patch_size"),
    *differs(GEN, VIDEO, "vllm_kwargs.limit_mm_per_prompt.video.num_frames"),
    *differs(GEN, "blocks of 128 x 128 share a scale", "vllm_cfg.is_mx"),
    *differs(GEN, ALL_QUANTISED, "vllm_cfg.quantization_ignored_layer_kws"),
    *differs(GEN, ALL_QUANTISED, "vllm_cfg.num_last_layers_in_bf16", 0),
    *differs(GEN, ALL_QUANTISED, "vllm_cfg.num_first_layers_in_bf16", 0),
    *differs(
        GEN, "log-probabilities are those of the distribution sampled from", "vllm_cfg.logprobs_mode", "processed_logprobs"
    ),
    *differs(GEN, "rollout.tool_parser reads calls; thoughts stay in answers", "vllm_cfg.reasoning_parser_plugin"),
    *same(GEN, "images are read where rows have them", "vllm_kwargs.language_model_only"),
    *same(
        f"{GEN}.vllm_kwargs.speculative_config",
        "drafts leave the distribution as it is: generator.vllm.speculative_model",
        "method model num_speculative_tokens draft_tensor_parallel_size",
    ),
    *differs(GEN, "the tokenizer is the model's own", "vllm_kwargs.tokenizer"),
    *differs(GEN, ENGINE, "mcore_generation_config.* sglang_cfg.* trtllm_cfg.* trtllm_kwargs.*"),
    *differs(GEN, ENGINE, "dynamo_cfg.*"),
    *differs(GEN, ENVIRONMENT, "vllm_cfg.env_vars.*"),
    *differs(
        GEN,
        "the server for agents takes model.chat_template and its variables; thoughts stay in answers",
        "vllm_cfg.http_server_serving_chat_kwargs vllm_cfg.http_server_serving_chat_kwargs.*",
    ),
)
