"""Megatron's TransformerConfig for a Hugging Face model, a layout and the recipe's `[trainer.megatron.transformer]`."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from attrs import evolve
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional as F

from rlcore.spi import ModelError, Problem
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.families.models import architecture_of, dims_of, standard_config
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.layouts.stages import layers_of_parts
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.passthrough import converted
from rlcore_megatron.setup.requirements import uses_transformer_engine
from rlcore_torchkit.architectures.dims import ModelDims


def transformer_config(
    hf: Any, config: MegatronConfig, layout: ParallelLayout, dtype: str, device: Literal["cpu", "cuda"]
) -> TransformerConfig:
    """The TransformerConfig for a transformers config `hf`; the recipe's table overrides what is derived."""
    fused = uses_transformer_engine(config, device, dtype)
    params_dtype, family, standard = getattr(torch, dtype), architecture_of(hf), standard_config(hf)
    dims = dims_of(hf)
    interleaved = layout.virtual_pipeline > 1
    values: dict[str, Any] = {
        **_shape(family, dims, standard["rms_norm_eps"]),
        **(_experts(dims, standard["norm_topk_prob"], layout, fused) if dims.num_moe_layers else {}),
        **family.transformer,
        **_recompute(config),
        **_uneven_stages(config, layout, dims.num_layers),
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if interleaved else None,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.tensor > 1 and layout.sequence_parallel,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": dtype == "bfloat16",
        # The weights are read; but what would draw them also marks the parameters that tensor ranks share, without which
        # gradients' norms come out too small.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "calculate_per_token_loss": True,  # losses are divided by global counts already: Megatron is to add up
        "variable_seq_lengths": layout.pipeline > 1,
        # Interleaved stages compute wrongly with batched exchange. Without CUDA's streams an output that is freed while it is
        # sent arrives wrong.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": device == "cuda",
        "transformer_impl": "transformer_engine" if fused else "local",
        # Without biases and dropout there is one addition, which is one kernel without a compiled function's calls too.
        "bias_dropout_fusion": False,
        "apply_rope_fusion": fused and dims.latent is None,  # its kernel knows positions of one sequence only
        "bias_activation_fusion": fused and _gate(family) is F.silu,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "fp8": "hybrid" if config.fp8 else None,
        # Needed with variable lengths for dense models too.
        "moe_token_dispatcher_type": "alltoall",
    }
    kind = TransformerConfig if dims.latent is None else MLATransformerConfig
    return kind(**values | converted(config.transformer, TransformerConfig))


def _uneven_stages(config: MegatronConfig, layout: ParallelLayout, num_layers: int) -> dict[str, Any]:
    """Megatron divides layers evenly by itself, and then needs no list of every part's."""
    sizes = {"pipeline_parallel": layout.pipeline, "virtual_pipeline_parallel": layout.virtual_pipeline}
    counts = layers_of_parts(evolve(config, **sizes), num_layers)
    if len(set(counts)) == 1:
        return {}
    parts = [["decoder"] * count for count in counts]
    return {"pipeline_model_parallel_layout": [["embedding", *parts[0]], *parts[1:-1], [*parts[-1], "loss"]]}


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def swish(states: torch.Tensor, beta: float) -> torch.Tensor:
    """x · sigmoid(beta · x) (arXiv:1710.05941)."""
    return states * torch.sigmoid(beta * states)


def _shape(family: MegatronFamily, dims: ModelDims, epsilon: float) -> dict[str, Any]:
    return {
        "num_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "ffn_hidden_size": dims.intermediate_size,
        "num_attention_heads": dims.num_heads,
        "num_query_groups": dims.num_kv_heads,
        "kv_channels": dims.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": epsilon,
        "qk_layernorm": family.has_qk_norms or dims.has_wide_norms,
        "gated_linear_unit": True,
        "activation_func": _gate(family),
        "add_bias_linear": family.has_all_biases,
        "add_qkv_bias": family.has_qkv_biases,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _gate(family: MegatronFamily) -> Callable[[torch.Tensor], torch.Tensor]:
    if family.has_gelu_gates:
        return partial(F.gelu, approximate="tanh")
    return F.silu if family.swish_beta == 1.0 else partial(swish, beta=family.swish_beta)


def _experts(dims: ModelDims, is_normalised: bool, layout: ParallelLayout, fused: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": dims.num_experts,
        "moe_ffn_hidden_size": dims.moe_intermediate_size,
        # A list would have Megatron ask for each layer by its number in checkpoints that hold all layers in one tensor.
        "moe_layer_freq": 1 if all(dims.has_experts) else [int(has_experts) for has_experts in dims.has_experts],
        "moe_shared_expert_intermediate_size": dims.shared_intermediate_size or None,
        "moe_router_topk": dims.num_experts_per_token,
        # Normalising the chosen experts' shares of one softmax equals a softmax over the chosen experts.
        "moe_router_pre_softmax": not is_normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def _recompute(config: MegatronConfig) -> dict[str, Any]:
    if config.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if config.recompute == "selective" else {}


def rotary_frequencies(hf: Any) -> torch.Tensor:
    """float32 [D/2] for a transformers config, scaled for long contexts where the model says so."""
    return scaled_frequencies(hf)[0]


def score_scale(hf: Any) -> float:
    """Return the factor of products of queries and keys. YaRN lengthens rotated queries and keys (arXiv:2309.00071, section
    3.4): here their product is, which is the same where whole heads are rotated."""
    width = architecture_of(hf).score_width or dims_of(hf).head_dim
    return float(width**-0.5 * scaled_frequencies(hf)[1] ** 2)


def scaled_frequencies(hf: Any) -> tuple[torch.Tensor, float]:
    """float32 [D/2] for a transformers config, and what cosines and sines are multiplied by. ModelError for a kind that the
    family's layers do not compute."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    family = architecture_of(hf)
    parameters = family.rope or standard_config(hf)["rope_parameters"]
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        width = int(dims_of(hf).head_dim * parameters.get("partial_rotary_factor", 1.0))
        return _frequencies(parameters["rope_theta"], width), 1.0
    if kind not in family.rotary:
        problem = Problem(
            path=str(hf.name_or_path),
            found=f'rope_type = "{kind}"',
            expected=f"one of {', '.join(family.rotary)}",
            remedy="Take another trainer for this model",
        )
        raise ModelError([problem])
    of_some_layers = {} if family.local_theta is None else {"layer_type": "full_attention"}
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), **of_some_layers)
    return frequencies, float(scale)


def local_frequencies(hf: Any) -> torch.Tensor | None:
    """float32 [D/2], of layers that see windows; None where they are rotated as the others are."""
    theta = architecture_of(hf).local_theta
    return None if theta is None else _frequencies(theta, dims_of(hf).head_dim)


def _frequencies(theta: float, width: int) -> torch.Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return torch.as_tensor(1.0 / (theta**exponents))
