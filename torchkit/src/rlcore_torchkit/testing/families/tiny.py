"""Tiny configurations of any family of decoders, by the fields that its configuration class has."""

from collections.abc import Iterator, Mapping
from typing import Any

VOCAB_SIZE = 96
_FIELDS: Mapping[int, str] = {
    1: """
        first_k_dense_replace n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts
        num_expert_group mamba_n_groups n_groups moe_layer_start_index num_dense_layers type_vocab_size num_mem_blocks
        H_cycles encoder_layers zero_expert_num num_kv_shared_layers decoder_sparse_step num_random_blocks
        attn_layer_offset moe_layer_interval o_groups mamba_ngroups expert_layer_offset altup_active_idx
    """,
    2: """
        num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_encoder_layers num_blocks
        num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts
        swa_num_key_value_heads linear_num_key_heads sliding_window_pattern _sliding_window_pattern
        global_attn_every_n_layers altup_num_inputs hc_mult hc_count attn_layer_period expert_layer_period
        num_query_groups no_rope_layer_interval ngram L_cycles interleave_moe_layer_step ngram_size heads_per_ngram
        hc_lowrank cross_attn_k n_langs num_layers_per_stack hc_sinkhorn_iters moe_layer_end_index scale_depth
        index_topk_blocks
    """,
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads
        num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts
        moe_num_experts n_mamba_heads linear_num_value_heads linear_num_heads swa_num_attention_heads rotary_dim
        mamba_dt_rank time_step_rank gated_norm_rank laurel_rank num_centroids centroid_intermediate_top_k
        index_block_size index_topk num_buckets linear_conv_kernel_dim adapter_rank d_rel
    """,
    6: """
        sliding_window window_size sliding_window_size attention_window_size attention_chunk_size local_attention
    """,
    8: """
        mamba_n_heads mamba_num_heads head_dim attention_head_dim d_head kv_channels qk_rope_head_dim qk_nope_head_dim
        v_head_dim mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_value_head_dim linear_head_dim
        swa_head_dim dim_head index_head_dim query_pre_attn_scalar router_hidden_size hidden_size_per_layer_input
        chunk_size mamba_chunk_size mamba_d_state ssm_state_size state_size o_lora_rank attention_head_size rel_extent
        num_codebooks ple_embed_dim dim_model_base
    """,
    16: """
        index_n_heads moe_intermediate_size kv_lora_rank q_lora_rank shared_expert_intermediate_size
        moe_shared_expert_intermediate_size expert_ffn_hidden_size qk_head_dim prompt_mid_dim
    """,
    32: """
        hidden_size hidden_size_global n_embd d_model attention_hidden_size embedding_size lru_width emb_dim
        embedding_dim word_embed_proj_dim backbone_hidden_size input_embedding_size output_embedding_size
        adapter_in_dim adapter_out_dim adapter_input_size
    """,
    64: """
        intermediate_size n_inner ffn_hidden_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff d_inner dim_ff
        mamba_d_ssm shared_intermediate_size intermediate_size_mlp dense_intermediate_size feed_forward_size
        prefix_dense_intermediate_size ngram_vocab_size_base
    """,
    VOCAB_SIZE: """
        vocab_size vocab_size_per_layer_input audio_vocab_size decoder_vocab_size
    """,
    128: """
        max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions context_length
        max_source_positions original_max_position_embeddings
    """,
}
SIZES: Mapping[str, int] = {name: value for value, names in _FIELDS.items() for name in names.split()}
"""Tiny values by the names that fields have in configuration classes of transformers."""
_OPTIONAL = (
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "num_query_groups",
)
"""Fields that get a tiny value although they have none by default."""
INITIAL = 0.2
"""Standard deviation of weights."""
_INITIAL = ("initializer_range", "init_std", "embed_init_std", "embedding_initializer_range")
_FACTORS: Mapping[str, float] = {
    "logit_scale": 0.5,
    "logits_scaling": 2.0,
    "lm_head_multiplier": 0.5,
    "final_logit_softcapping": 2.0,
    "logits_soft_cap": 2.0,
    "output_logit_soft_cap": 2.0,
}
"""Scales and caps of logits that tiny models have, so that log-probabilities depend on them."""
_MAX_LAYERS = 4


def tiny_options(
    default: Any, corrections: Mapping[str, Any], sizes: Mapping[str, int] = SIZES, initial: float = INITIAL
) -> dict[str, Any]:
    """Return options that make a tiny configuration of the class that `default` is an instance of, by `sizes` of fields with
    these names and the standard deviation of weights; `corrections` come last."""
    fields = default.to_dict()
    options: dict[str, Any] = {
        name: value
        for name, value in sizes.items()
        if type(fields.get(name)) is int or (name in _OPTIONAL and name in fields and fields[name] is None)
    }
    if fields.get("kv_lora_rank") and "num_key_value_heads" in options:
        options["num_key_value_heads"] = options["num_attention_heads"]
    if fields.get("kv_lora_rank") and "head_dim" in options and "qk_rope_head_dim" in options:
        options["head_dim"] = options["qk_rope_head_dim"]
    options |= {name: True for name in ("is_decoder",) if name in fields}
    options |= {name: initial for name in _INITIAL if isinstance(fields.get(name), float)}
    options |= {name: value for name, value in _FACTORS.items() if isinstance(fields.get(name), int | float)}
    options |= dict(_tokens(fields))
    options |= _layers(fields)
    for name, part in vars(default).items():
        if hasattr(part, "to_dict"):
            options[name] = tiny_options(part, {}, sizes, initial)
    return {**options, **corrections}


def _tokens(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield numbers of special tokens within the vocabulary."""
    number = VOCAB_SIZE - 1
    for name, value in fields.items():
        if name == "eos_token_id":
            yield name, 0
        elif name.endswith(("_token_id", "_token_index")) and type(value) is int:
            yield name, number
            number -= 1


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return lists with an entry a layer, cut to the first layer of each kind."""
    count = next((fields[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if fields.get(name)), None)
    lists = {name: value for name, value in fields.items() if isinstance(value, list | tuple) and len(value) == count}
    if not lists:
        return {}
    kinds = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    firsts = sorted({kinds.index(kind) for kind in kinds})[:_MAX_LAYERS]
    firsts = firsts if len(firsts) > 1 else [0, 1]
    return {"num_hidden_layers": len(firsts), **{name: [value[index] for index in firsts] for name, value in lists.items()}}
