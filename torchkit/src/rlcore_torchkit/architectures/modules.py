"""Names of a family's modules, in transformers' classes and in tensors alike."""

from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class ModuleNames:
    """Dotted names of the modules of a causal language model; the defaults are Llama's, which most families took over."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    """The list of the layers, below which the names of a layer's modules begin."""
    norm: str = "model.norm"
    """The norm after the last layer."""
    rotary: str = "model.rotary_emb"
    head: str = "lm_head"

    input_norm: str = "input_layernorm"
    """The first module of a layer, its norm before attention; the following names are below a layer too."""
    attention: str = "self_attn"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    query_down: str = "self_attn.q_a_proj"
    """With multi-latent attention, the narrow projection that queries are made from, and the following names too."""
    query_up: str = "self_attn.q_b_proj"
    key_value_down: str = "self_attn.kv_a_proj_with_mqa"
    key_value_up: str = "self_attn.kv_b_proj"
    mlp_norm: str = "post_attention_layernorm"
    """The norm before the MLP."""
    mlp: str = "mlp"
    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    """The name of the tensor that a router adds to scores to choose by, in families with such a bias."""
    experts: str = "mlp.experts"
    shared_expert: str = "mlp.shared_expert"
    """The MLP beside the experts that every token goes through, in families with one."""
    shared_gate: str = "mlp.shared_expert_gate"
    """The linear layer of that expert's gate, in families with such a gate."""
    delta_net: str = "linear_attn"
    """The gated delta net of a layer, in families with such layers."""

    gate: str = "gate_proj"
    """The first module of an MLP or of an expert; the following names are below these too."""
    up: str = "up_proj"
    down: str = "down_proj"

    def layers_of(self, model: Any) -> Any:
        """The layers of a transformers causal language model, in their order."""
        return model.get_submodule(self.layers)

    def experts_of(self, layer: Any) -> Any:
        """The module that holds a layer's experts; None in a layer with an MLP."""
        return dict(layer.named_modules()).get(self.experts)
